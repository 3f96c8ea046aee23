"""Blends beside answers that are being generated: slice by slice, and as right as those that run alone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from blendrag.engine.client.generation import Delta, Sampling
from blendrag.engine.wire.recipe import Recipe
from workbench import CHUNK_TOKENS, FIRST, Bench, Prompt, distance

pytestmark = pytest.mark.engine

T = TypeVar("T")
LONG = Sampling(max_tokens=400, other={"ignore_eos": True})


@contextlib.asynccontextmanager
async def answering(bench: Bench) -> AsyncIterator[list[Delta]]:
    """Another answer is being generated meanwhile; its tokens so far."""
    pieces: list[Delta] = []
    begun = asyncio.Event()

    async def read() -> None:
        async for delta in bench.engine.astream(bench.encode("Once upon a time there was a"), LONG):
            pieces.append(delta)
            begun.set()

    task = asyncio.create_task(read())
    await begun.wait()
    try:
        yield pieces
        assert not task.done(), "it ended too soon to prove anything"
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def beside(bench: Bench, work: Callable[[list[Delta]], Awaitable[T]]) -> T:
    async def run() -> T:
        async with answering(bench) as pieces:
            return await work(pieces)

    return asyncio.run(run())


async def ask(bench: Bench, prompt: Prompt, recipe: Recipe | None) -> Delta:
    return await bench.engine.agenerate(prompt.token_ids, FIRST, recipe)


async def begun(bench: Bench, prompt: Prompt, pieces: list[Delta], tokens: int) -> asyncio.Task[Delta]:
    """A request that is still blended when the other answer has gone on by so many tokens."""
    task = asyncio.create_task(ask(bench, prompt, bench.recipe(prompt, ratio=0.5)))
    before = len(pieces)
    while len(pieces) < before + tokens:
        await asyncio.sleep(0.01)
    assert not task.done()
    return task


@pytest.mark.parametrize("selector", ["hkvd", "gradual", "first_k", "query"])
def test_blend_beside_an_answer_gives_what_it_gives_alone(bench: Bench, selector: str) -> None:
    prompt = bench.prompt(bench.pieces[:8])
    whole = bench.blended(prompt, selector=selector, ratio=0.2)
    assert whole.report is not None
    bench.reset()
    sliced = beside(bench, lambda _: ask(bench, prompt, bench.recipe(prompt, selector=selector, ratio=0.2)))
    assert sliced.report is not None and sliced.report.slices > 3
    assert sliced.report.recomputed == whole.report.recomputed
    assert distance(sliced, whole) < 1e-3


def test_running_answer_goes_on_while_chunks_are_prefilled(own_bench: Bench) -> None:
    again = [piece._replace(key=f"again {piece.key}") for piece in own_bench.pieces]  # computed, and not kept

    async def tokens_meanwhile(answer: list[Delta]) -> int:
        before = len(answer)
        done = await asyncio.to_thread(own_bench.client.ingest, again)
        assert done.tokens == len(again) * CHUNK_TOKENS
        return len(answer) - before

    assert beside(own_bench, tokens_meanwhile) > 3


def test_many_that_prefill_chunks_leave_the_engine_its_steps(own_bench: Bench) -> None:
    client, pieces = own_bench.client, own_bench.pieces
    calls = [[piece._replace(key=f"{name} {piece.key}") for piece in pieces] for name in "abcdefgh"]

    async def longest_gap(answer: list[Delta]) -> float:
        begin, seen, gaps = time.perf_counter(), len(answer), []
        repairs = [asyncio.wrap_future(client.ingest_later(call)) for call in calls]
        while not all(repair.done() for repair in repairs):
            await asyncio.sleep(0.002)
            if len(answer) > seen:
                seen, now = len(answer), time.perf_counter()
                gaps.append(now - begin)
                begin = now
        whole = sum(gaps) + time.perf_counter() - begin
        return max(*gaps, time.perf_counter() - begin) / whole

    assert beside(own_bench, longest_gap) < 0.2, "eight in a row would be nearly all of it"


def test_chunk_that_is_prefilled_in_slices_has_the_same_kv(own_bench: Bench) -> None:
    prompt = own_bench.prompt(own_bench.pieces[:4])
    whole = own_bench.blended(prompt, ratio=0.0)
    own_bench.client.delete([piece.key for piece in own_bench.pieces])

    async def ingested(_: list[Delta]) -> None:
        await asyncio.to_thread(own_bench.ingest, own_bench.pieces)

    beside(own_bench, ingested)
    assert distance(own_bench.blended(prompt, ratio=0.0), whole) < 1e-3


@pytest.mark.parametrize("selector", ["hkvd", "query"])
def test_running_answer_does_not_wait_for_a_slow_disk(bench: Bench, tmp_path: Path, selector: str) -> None:
    slow = [{"kind": "disk", "throttle": 4_000_000}]
    own = replace(bench, root=tmp_path / "slow", pieces=bench.pieces[:4]).open(stack=slow)
    prompt = own.prompt(own.pieces)
    alone = bench.blended(prompt, selector=selector)  # from memory
    try:
        own.reset()

        async def tokens_meanwhile(answer: list[Delta]) -> tuple[int, Delta]:
            before = len(answer)
            delta = await ask(own, prompt, own.recipe(prompt, selector=selector))
            return len(answer) - before, delta

        tokens, delta = beside(own, tokens_meanwhile)
    finally:
        own.close()
    assert tokens > 10
    assert delta.report and not delta.report.problem
    assert distance(delta, alone) < 1e-3


def test_request_that_gives_up_while_it_is_blended_gives_back_its_blocks(bench: Bench) -> None:
    prompt = bench.prompt(bench.pieces[:12])
    bench.reset()

    async def give_up(pieces: list[Delta]) -> None:
        task = await begun(bench, prompt, pieces, 3)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    beside(bench, give_up)
    bench.reset()  # fails while any request holds KV
    assert bench.blended(prompt, ratio=0.5).report


def test_store_that_closes_under_a_blend_ends_in_plain_prefills_answer(own_bench: Bench) -> None:
    prompt = own_bench.prompt(own_bench.pieces)
    plain = own_bench.plain(prompt)
    own_bench.reset()

    async def close(pieces: list[Delta]) -> Delta:
        task = await begun(own_bench, prompt, pieces, 2)
        await asyncio.to_thread(own_bench.close)
        return await task

    delta = beside(own_bench, close)
    assert delta.report is not None and delta.report.fallback
    assert distance(delta, plain) < 1e-3
