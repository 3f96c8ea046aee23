"""What a policy saves, closes and misses."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.lab.replay.against import against, needed, saved

SIZES = [100, 200, 400]


@st.composite
def curves(draw: st.DrawFn) -> tuple[list[int], list[float], list[float]]:
    """Ascending sizes, and two hit ratios that do not fall: with plateaus, and with equal values."""
    sizes = sorted(draw(st.sets(st.integers(1, 10**6), min_size=1, max_size=8)))
    hit = st.integers(0, 20).map(lambda twentieth: twentieth / 20)
    lists = st.lists(hit, min_size=len(sizes), max_size=len(sizes)).map(sorted)
    return sizes, draw(lists), draw(lists)


@given(curves())
def test_cache_is_saved_where_no_replay_tells(drawn: tuple[list[int], list[float], list[float]]) -> None:
    sizes, lru, hits = drawn
    for wanted, share in zip(lru, saved(sizes, lru, hits), strict=True):
        assert (share is None) == (not hits[0] <= wanted <= hits[-1])


@given(curves())
def test_less_cache_than_that_finds_as_much(drawn: tuple[list[int], list[float], list[float]]) -> None:
    sizes, _, hits = drawn
    for wanted in np.linspace(hits[0], hits[-1], 7):
        need = needed(sizes, hits, float(wanted))
        assert need is not None and sizes[0] <= need <= sizes[-1]
        assert np.interp(need, sizes, hits) == pytest.approx(wanted)
        below = [size for size in sizes if size < need - 1e-6]  # nearer than that, rounding decides
        assert not below or np.interp((below[-1] + need) / 2, sizes, hits) < wanted
    needs = [needed(sizes, hits, float(wanted)) for wanted in np.linspace(hits[0], hits[-1], 7)]
    assert all(low <= high for low, high in pairwise(needs))  # type: ignore[operator]


@given(curves())
def test_policy_that_finds_more_saves_less(drawn: tuple[list[int], list[float], list[float]]) -> None:
    sizes, lru, hits = drawn
    better = [max(pair) for pair in zip(lru, hits, strict=True)]
    assert all(share is None or share >= -1e-9 for share in saved(sizes, lru, better))
    for some, more in zip(saved(sizes, lru, hits), saved(sizes, lru, better), strict=True):
        assert some is None or more is None or more >= some - 1e-9


@given(curves())
def test_lru_saves_cache_against_itself(drawn: tuple[list[int], list[float], list[float]]) -> None:
    sizes, lru, _ = drawn
    assert saved(sizes, lru, lru) == [0.0] * len(sizes)


def test_cache_that_is_saved_is_not_read_off_the_line() -> None:
    assert saved(SIZES, [0.1, 0.2, 0.4], [0.15, 0.25, 0.4]) == [None, pytest.approx(0.25), 0.0]
    assert saved(SIZES, [0.3, 0.3, 0.5], [0.2, 0.3, 0.4]) == [pytest.approx(-1.0), pytest.approx(-1.0), None]


def test_cache_that_lru_does_not_need_either_counts_as_saved() -> None:
    assert saved(SIZES, [0.1, 0.4, 0.4], [0.4, 0.4, 0.4]) == [None, 0.5, 0.5]


def test_bounds_and_spread_are_of_other_policies() -> None:
    lru, lpc, best = [0.1, 0.2, 0.4], [0.1, 0.3, 0.4], [0.3, 0.4, 0.4]
    traces = [{"lru": lru, "lpc": lru, "optimal": best}, {"lru": lru, "lpc": best, "optimal": best}]
    found = against(SIZES, {"lru": lru, "lpc": lpc, "optimal": best}, traces)
    assert found["closed"]["lpc"] == [0.0, pytest.approx(0.5), None]
    assert found["behind"]["optimal"]["lru"] == pytest.approx([0.2, 0.2, 0.0])
    assert found["behind"]["optimal"]["lpc"] == pytest.approx([0.2, 0.1, 0.0])
    assert found["saved"]["lpc"] == [0.0, pytest.approx(0.25), 0.0]
    assert found["saved_spread"]["lpc"] == [None, None, [0.0, 0.5]]
    assert set(against(SIZES, {"lpc": lpc, "optimal": best}, [])) == {"behind"}
