"""Inter-token latency beside arrivals, from times that are known."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from blendrag.errors import ConfigError
from blendrag.lab.bench.beside import MeasuredWindow, ratios_to_alone, summarise_windows
from blendrag.lab.bench.timed import Timed


def window(tokens: list[list[float]], arrivals: list[tuple[float, float]], end: float = 10) -> MeasuredWindow:
    """tokens: per answer when they came; arrivals: when due, when the first token came."""
    decodes = [Timed(0, 0, times) for times in tokens]
    return MeasuredWindow(1, end, decodes, [Timed(due, due, [first], first) for due, first in arrivals])


ALONE = window([[0.5, 1.5, 2.5, 3.5, 4.5], [1, 2, 3]], [])
BESIDE = window([[0.5, 1.5, 5.5, 6.5, 7.5]], [(2, 5), (6.6, 6.7)])


def test_time_between_two_answers_counts_as_latency() -> None:
    two = window([[1, 2, 3], [8, 9]], [])
    assert summarise_windows([two]).itl_ms.max == 1000


def test_tokens_outside_of_the_window_count() -> None:
    assert summarise_windows([window([[1, 2, 9, 12]], [], end=3)]).itl_ms.max == 1000
    assert summarise_windows([ALONE]).tokens_per_s == pytest.approx(6 / 9)


def test_gap_that_no_arrival_fell_into_counts_as_beside_one() -> None:
    found = summarise_windows([BESIDE])
    assert [stop for _, stop in BESIDE.during] == [5.5, 7.5]
    assert found.during_ms.p50 == 2500 and found.itl_ms.p50 == 1000
    assert found.arrival_ttft_ms and found.arrival_ttft_ms.p90 == pytest.approx(1000 * (0.1 + 0.9 * 2.9))
    assert summarise_windows([ALONE]).arrival_ttft_ms is None


def test_ratio_is_not_to_the_same_repeat_alone() -> None:
    slow = window([[1, 3, 5, 7, 9]], [])
    found = ratios_to_alone({"alone": [ALONE, slow], "full": [BESIDE, BESIDE]})
    assert list(found) == ["full"]
    assert asdict(found["full"].itl.max) == pytest.approx({"p10": 2.2, "median": 3, "p90": 3.8})


def test_trace_is_not_by_time() -> None:
    assert [at for at, _ in ALONE.trace()] == [0.5, 1, 1.5, 2, 2.5, 3.5]


def test_window_without_tokens_is_a_traceback() -> None:
    with pytest.raises(ConfigError, match="--chunks"):
        summarise_windows([window([[1]], [])])
