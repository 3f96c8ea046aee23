"""``bench beside`` on an engine whose tokens come when the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from blendrag.engine.client.generation import Delta
from blendrag.engine.recipe import Recipe
from blendrag.engine.report import BlendReport
from blendrag.errors import EngineError
from blendrag.lab.bench.beside import BesideOptions, MeasuredWindow, _Beside
from blendrag.lab.prompts import Prompt
from blendrag.progress import SILENT

STORIES = ((1,), (2,))
PROMPT = Prompt((7, 8, 9), (("key", 0, 2),))
BLENDED = BlendReport(recomputed=1)


class Scripted:
    """Stories get a token every 5 ms, but none while a prompt is computed, for 60 ms."""

    def __init__(self, report: BlendReport | None, failing: int | None = None) -> None:
        self._report, self._failing, self._free = report, failing, asyncio.Event()
        self._free.set()

    def reset_prefix_cache(self) -> bool:
        return True

    async def astream(
        self, token_ids: Sequence[int], sampling: Any, recipe: Recipe | None, namespace: str
    ) -> AsyncIterator[Delta]:
        if token_ids[0] == self._failing:
            raise EngineError("the engine has died")
        if tuple(token_ids) == PROMPT.token_ids:
            self._free.clear()
            await asyncio.sleep(0.06)
            self._free.set()
            yield Delta("", [5], 0.06, report=self._report if recipe else None)
            return
        for _ in range(sampling.max_tokens):
            await asyncio.sleep(0.005)
            await self._free.wait()
            yield Delta("", [5], 0.005)


def window(condition: str, engine: Any, gap: float = 0.02) -> MeasuredWindow:
    none: Any = None  # no store is asked here

    async def measured() -> MeasuredWindow:
        recipes = {"blended": Recipe("store", ())}
        beside = _Beside(engine(), recipes, STORIES, BesideOptions(), SILENT, none, {})
        return await asyncio.wait_for(beside._window(condition, [PROMPT], gap), 20)

    return asyncio.run(measured())


def test_wait_that_outlasts_the_gap_is_left_out() -> None:
    found = window("full", lambda: Scripted(None))
    assert found.end >= found.arrivals[0].tokens[0] > found.begin + 0.02
    alone = window("alone", lambda: Scripted(None))
    assert not alone.arrivals and alone.gaps


@pytest.mark.parametrize(
    "report", [None, BlendReport(fallback="no room"), BlendReport(missing={"key": "gone"})]
)
def test_prompt_that_was_prefilled_passes_for_a_blend(report: BlendReport | None) -> None:
    with pytest.raises(EngineError, match="was not blended, so its numbers would mean nothing"):
        window("blended", lambda: Scripted(report))
    assert window("blended", lambda: Scripted(BLENDED)).waits


def test_answer_that_fails_is_waited_for() -> None:
    with pytest.raises(EngineError, match="has died"):
        window("alone", lambda: Scripted(None, failing=2), gap=1000)
