"""When requests are sent, and at which rates."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.lab.bench.open_loop import arrival_times

RATES = st.floats(0.1, 20)


@given(rate=RATES, faster=st.floats(1.1, 5), seed=st.integers(0, 1000))
def test_another_rate_has_the_same_pattern_of_gaps(rate: float, faster: float, seed: int) -> None:
    slow, fast = arrival_times(rate, 30, seed), arrival_times(rate * faster, 30, seed)
    assert slow == sorted(slow) and all(0 < at < 30 for at in slow)
    assert len(fast) >= len(slow)
    for one, other in zip(slow, fast, strict=False):
        assert one == pytest.approx(other * faster)


@given(rate=RATES, seed=st.integers(0, 1000))
def test_recorded_arrivals_come_at_the_rate_with_their_own_gaps(rate: float, seed: int) -> None:
    times = arrival_times(rate, 900 / rate, seed, [0.0, 1.0, 1.0, 4.0])
    gaps = [rate * (after - before) for before, after in itertools.pairwise(times)]
    assert {round(gap, 6) for gap in gaps} == {0.75, 0.0, 2.25}
    assert len(times) == pytest.approx(900, abs=3)


def test_requests_come_at_random_at_the_rate() -> None:
    times = arrival_times(50, 200, seed=1)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 50, rel=0.05) and spread == pytest.approx(mean, rel=0.05)
    assert times != arrival_times(50, 200, seed=2)
