"""Streamed requests, and when their tokens came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.generation import Sampling
from blendrag.engine.wire.recipe import Recipe
from blendrag.engine.wire.report import BlendReport
from blendrag.lab.arms import reset


@dataclass(slots=True)
class Timed:
    """Times of a streamed request, in seconds on the clock of ``time.perf_counter``.

    due: when it should have been sent; waiting begins there, however late the client was. tokens: when each
    came. done: None if it was cut off. reused: prompt tokens that the engine did not compute itself.
    report: what the engine says of a blend; None where there is nothing to say, as of one found in the prefix
    cache.
    """

    due: float
    sent: float = 0.0
    tokens: list[float] = field(default_factory=list)
    done: float | None = None
    reused: int = 0
    report: BlendReport | None = None

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """The (begin, end) between one token and the next."""
        return list(pairwise(self.tokens))


def exactly(tokens: int) -> Sampling:
    """Return sampling that gives answers of this length, so that all arms decode as much."""
    return Sampling(max_tokens=tokens, other={"ignore_eos": True})


async def ask_timed(
    engine: Engine,
    token_ids: Sequence[int],
    sampling: Sampling,
    timed: Timed,
    recipe: Recipe | None = None,
    namespace: str = "",
) -> None:
    """Send a request now, and note in ``timed`` what comes when. Cancelling it stops the request."""
    timed.sent = time.perf_counter()
    async for delta in engine.astream(token_ids, sampling, recipe, namespace):
        now = time.perf_counter()
        timed.tokens += [now] * len(delta.token_ids)
        timed.reused = timed.reused or delta.prefix_tokens
        timed.report = delta.report
    timed.done = time.perf_counter()


async def stop(engine: Engine, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel what still runs, wait until the engine has let go of it, raise what any of them failed with."""
    try:
        await cancel(tasks)
    finally:
        reset(engine)


async def cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what still runs, and raise what any of them failed with."""
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
