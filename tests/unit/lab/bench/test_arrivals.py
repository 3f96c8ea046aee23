"""When requests are sent, and how the highest rate that is sustained is found."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.errors import ConfigError
from blendrag.lab.bench.arrivals import STEP, RateSearch, arrival_times, parse_rates, rung_below

RATES = st.floats(0.1, 20)


@given(rate=RATES, faster=st.floats(1.1, 5), seed=st.integers(0, 1000))
def test_another_rate_has_another_pattern_of_gaps(rate: float, faster: float, seed: int) -> None:
    slow, fast = arrival_times(rate, 30, seed), arrival_times(rate * faster, 30, seed)
    assert slow == sorted(slow) and all(0 < at < 30 for at in slow)
    assert len(fast) >= len(slow)
    for one, other in zip(slow, fast, strict=False):
        assert one == pytest.approx(other * faster)


def test_requests_come_regularly_or_at_another_rate() -> None:
    times = arrival_times(50, 200, seed=1)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 50, rel=0.05) and spread == pytest.approx(mean, rel=0.05)
    assert times != arrival_times(50, 200, seed=2)


@given(limit=st.integers(-40, 40), start=st.integers(-20, 20))
def test_search_ends_anywhere_but_at_the_highest_sustained_rung(limit: int, start: int) -> None:
    search, tried = RateSearch(start, tries=100), []
    while (rung := search.next()) is not None:
        assert rung not in tried
        tried.append(rung)
        search.tell(rung, rung <= limit)
    assert (search.sustained, search.failed) == (limit, limit + 1)


@given(tries=st.integers(1, 8), limit=st.integers(-40, 40))
def test_search_takes_more_tries_than_it_was_given(tries: int, limit: int) -> None:
    search, taken = RateSearch(0, tries), 0
    while (rung := search.next()) is not None:
        search.tell(rung, rung <= limit)
        taken += 1
    assert taken <= tries


@given(rate=RATES, base=RATES)
def test_search_begins_above_the_rate_it_should_begin_at(rate: float, base: float) -> None:
    rung = rung_below(rate, base)
    assert base * STEP**rung <= rate * (1 + 1e-6) < base * STEP ** (rung + 1) * (1 + 1e-6)


def test_rates_are_sorted_and_each_once() -> None:
    assert parse_rates("2, 0.5,2.0") == (0.5, 2.0)


@pytest.mark.parametrize("text", ["", "1,", "fast", "0", "-1", "nan", "inf", "1e9"])
def test_rate_that_cannot_be_sent_is_accepted(text: str) -> None:
    with pytest.raises(ConfigError, match="--rates"):
        parse_rates(text)
