"""``bench load --beside`` on an engine whose tokens come when the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from blendrag.engine.client.generation import Delta
from blendrag.engine.wire.recipe import Recipe
from blendrag.engine.wire.report import BlendReport
from blendrag.errors import EngineError
from blendrag.lab.bench import beside
from blendrag.lab.bench.beside import MeasuredWindow, _Beside
from blendrag.lab.prompts import Prompt

STORIES = ((1,), (2,))
SHORT = Prompt((3,), ())
PROMPT = Prompt((7, 8, 9), (("key", 0, 2),))
BLENDED = BlendReport(recomputed=1)


class Scripted:
    """Stories and short prompts get a token every 5 ms, but none while a prompt is computed, for 60 ms."""

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


@pytest.fixture(autouse=True)
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "ALONE_S", 0.05)
    monkeypatch.setattr(beside, "INTO_S", 0.02)


def window(condition: str, engine: Any) -> MeasuredWindow:
    none: Any = None  # no store is asked here

    async def measured() -> MeasuredWindow:
        own = _Beside(engine(), {"blended": Recipe("store", ())}, STORIES, SHORT, none, {})
        return await asyncio.wait_for(own.measure(condition, PROMPT), 20)

    return asyncio.run(measured())


def test_what_answers_and_a_short_prompt_wait_for_an_arrival_is_counted() -> None:
    found, alone = (window(condition, lambda: Scripted(None)) for condition in ("full", "alone"))
    assert max(found.itl_ms) > 55 and found.short_s > 0.035
    assert len(alone.gaps) > 4 and max(alone.itl_ms) < 55 and alone.short_s < 0.03


@pytest.mark.parametrize(
    "report", [None, BlendReport(fallback="no room"), BlendReport(missing={"key": "gone"})]
)
def test_prompt_that_was_prefilled_does_not_pass_for_a_blend(report: BlendReport | None) -> None:
    with pytest.raises(EngineError, match="was not blended, so its numbers would mean nothing"):
        window("blended", lambda: Scripted(report))
    assert window("blended", lambda: Scripted(BLENDED)).gaps


def test_answer_that_fails_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "ALONE_S", 1000)
    with pytest.raises(EngineError, match="has died"):
        window("alone", lambda: Scripted(None, failing=2))
