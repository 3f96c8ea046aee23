"""``bench load --beside`` on an engine whose tokens come when the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Any

import pytest

from blendrag.engine.client.generation import Delta
from blendrag.engine.wire.recipe import Recipe
from blendrag.engine.wire.report import BlendReport
from blendrag.errors import ConfigError, EngineError
from blendrag.lab.bench import beside
from blendrag.lab.bench.beside import MeasuredWindow, _Beside, summarise_windows
from blendrag.lab.bench.timed import Timed
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


def measured(condition: str, engine: Any) -> MeasuredWindow:
    none: Any = None  # no store is asked here

    async def once() -> MeasuredWindow:
        own = _Beside(engine(), {"blended": Recipe("store", ())}, STORIES, SHORT, none, {})
        return await asyncio.wait_for(own.measure(condition, PROMPT), 20)

    return asyncio.run(once())


def test_what_answers_and_a_short_prompt_wait_for_an_arrival_is_counted() -> None:
    found, alone = (measured(condition, lambda: Scripted(None)) for condition in ("full", "alone"))
    assert max(found.itl_ms) > 55 and found.short_s > 0.035
    assert len(alone.trace) > 4 and max(alone.itl_ms) < 55 and alone.short_s < 0.03


@pytest.mark.parametrize(
    "report", [None, BlendReport(fallback="no room"), BlendReport(missing={"key": "gone"})]
)
def test_prompt_that_was_prefilled_does_not_pass_for_a_blend(report: BlendReport | None) -> None:
    with pytest.raises(EngineError, match="was not blended, so its numbers would mean nothing"):
        measured("blended", lambda: Scripted(report))
    assert measured("blended", lambda: Scripted(BLENDED)).trace


def test_answer_that_fails_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "ALONE_S", 1000)
    with pytest.raises(EngineError, match="has died"):
        measured("alone", lambda: Scripted(None, failing=2))


def window(
    tokens: list[list[float]], due: float = 1, first: float = 10, short_s: float = 0.1
) -> MeasuredWindow:
    """tokens: per answer when they came; first: when the first token of what was due came."""
    return MeasuredWindow(Timed(due, due, [first]), [Timed(0, 0, times) for times in tokens], short_s)


ALONE = window([[0.5, 1.5, 2.5, 3.5, 4.5], [1, 2, 3]])
BESIDE = window([[0.5, 1.5, 5.5, 6.5, 7.5]], due=2, first=5, short_s=0.3)


def test_time_between_two_answers_is_no_latency() -> None:
    assert max(window([[1, 2, 3], [8, 9]]).itl_ms) == 1000


def test_gap_that_no_arrival_fell_into_does_not_count_as_beside_one() -> None:
    assert BESIDE.trace == [(3.5, 4000)]  # since it was due at 2
    assert [at for at, _ in window([[0, 1, 2, 9, 12, 14]], first=10).trace] == [1, 8, 11]


def test_numbers_are_of_their_condition_and_ratios_of_their_repeat() -> None:
    slow = window([[1, 3, 5, 7, 9]])
    found = summarise_windows({"alone": [ALONE, slow], "full": [BESIDE, BESIDE]})
    assert list(found) == ["alone", "full"] and found["alone"].arrival_ms is None
    full = found["full"]
    assert full.itl_ms.p50 == 4000 and full.arrival_ms and full.arrival_ms.median == pytest.approx(3000)
    assert full.short_ms.median == pytest.approx(300) and full.short_ratio.median == pytest.approx(3)
    assert asdict(full.itl_p95_ratio) == pytest.approx({"p10": 2.2, "median": 3, "p90": 3.8})


def test_trace_is_by_time() -> None:
    assert [at for at, _ in ALONE.trace] == [0.5, 1, 1.5, 2, 2.5, 3.5]


def test_window_without_tokens_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="--chunks"):
        summarise_windows({"alone": [window([[1]])]})
