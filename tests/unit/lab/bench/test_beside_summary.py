"""What requests lose beside arrivals, from times that are known."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from blendrag.errors import ConfigError
from blendrag.lab.bench.beside import MeasuredWindow, summarise_windows
from blendrag.lab.bench.timed import Timed


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
    assert [stop for _, stop in BESIDE.gaps] == [5.5]
    assert [stop for _, stop in window([[0, 1, 2, 9, 12, 14]], first=10).gaps] == [2, 9, 12]


def test_numbers_are_of_their_condition_and_ratios_of_their_repeat() -> None:
    slow = window([[1, 3, 5, 7, 9]], short_s=0.2)
    found = summarise_windows({"alone": [ALONE, slow], "full": [BESIDE, BESIDE]})
    assert list(found) == ["alone", "full"] and found["alone"].arrival_ms is None
    full = found["full"]
    assert full.itl_ms.p50 == 4000 and full.arrival_ms and full.arrival_ms.median == pytest.approx(3000)
    assert full.short_ms.median == pytest.approx(300)
    assert asdict(full.itl_p95_ratio) == pytest.approx({"p10": 2.2, "median": 3, "p90": 3.8})
    assert asdict(full.short_ratio) == pytest.approx({"p10": 1.65, "median": 2.25, "p90": 2.85})


def test_trace_is_by_time() -> None:
    assert [at for at, _ in ALONE.trace()] == [0.5, 1, 1.5, 2, 2.5, 3.5]


def test_window_without_tokens_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="--chunks"):
        summarise_windows({"alone": [window([[1]])]})
