"""Pieces of a generation that goes on whether or not somebody reads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import aclosing, closing

import pytest

from blendrag.engine.client.generation import Delta
from blendrag.engine.client.pieces import Pieces, Put, StreamItem
from blendrag.errors import EngineError

WORDS: list[StreamItem] = [Delta(word, [at], 0.1) for at, word in enumerate("abcdefgh")]


class Task(Future[None]):
    """A generation: its pieces are given when the test says."""

    give: Put

    def begin(self, put: Put) -> Future[None]:
        self.give = put
        return self


def generation(*items: StreamItem) -> tuple[Pieces, Task]:
    task = Task()
    pieces = Pieces(task.begin)
    for item in items:
        task.give(item)
    return pieces, task


def read(pieces: Pieces) -> str:
    return "".join(piece.text for piece in pieces.stream())


def aread(pieces: Pieces) -> str:
    async def all_of_them() -> str:
        return "".join([piece.text async for piece in pieces.astream()])

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("reader", [read, aread])
@pytest.mark.parametrize("early", range(len(WORDS) + 1))
def test_pieces_that_came_before_the_reader_are_kept_in_order(
    early: int, reader: Callable[[Pieces], str]
) -> None:
    pieces, task = generation(*WORDS[:early])
    rest = threading.Thread(target=lambda: [task.give(item) for item in (*WORDS[early:], None)])
    rest.start()
    assert reader(pieces) == "abcdefgh"
    rest.join()


@pytest.mark.parametrize("reader", [read, aread])
def test_error_is_given_behind_the_pieces_in_front_of_it(reader: Callable[[Pieces], str]) -> None:
    pieces, _ = generation(WORDS[0], EngineError("died"))
    assert pieces.failed
    with pytest.raises(EngineError, match="died"):
        reader(pieces)


def test_generation_that_has_ended_or_was_cancelled_does_not_run() -> None:
    pieces, task = generation(*WORDS)
    assert pieces.running
    task.set_result(None)
    assert not pieces.running
    pieces, _ = generation()
    pieces.cancel()
    assert not pieces.running


def test_reader_that_goes_stops_the_generation() -> None:
    pieces, task = generation(*WORDS)
    with closing(pieces.stream()) as stream:
        next(stream)
    assert task.cancelled()

    async def begin_to_read(pieces: Pieces) -> None:
        async with aclosing(pieces.astream()) as stream:
            await anext(stream)

    pieces, task = generation(*WORDS)
    asyncio.run(begin_to_read(pieces))
    assert task.cancelled()
