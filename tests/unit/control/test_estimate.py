"""Estimates against machines whose times are known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.control.estimate import Estimator, PrefillCurve, pipelined_s
from blendrag.control.fit import evaluate, fit_times
from blendrag.control.profile import PrefillPoint
from blendrag.select import SELECTORS
from paper_machine import LATENCY, LAYERS, OVERHEAD_S, SPEEDS, make_profile, prefill_s, recompute_s

HKVD, READER = (Estimator.of(make_profile(selector=name)) for name in ("hkvd", "query"))
SECONDS = st.floats(min_value=0, max_value=1e3)


def test_estimate_is_exact_at_measured_points() -> None:
    rng = random.Random(0)
    points = [
        PrefillPoint(cached=cached, new=new, seconds=prefill_s(cached, new) * rng.uniform(0.7, 1.4))
        for cached in (0, 512, 1536)
        for new in (64, 512, 1536, 3072)
    ]
    curve = PrefillCurve.fit(points)
    for point in points:
        assert curve.seconds(point.cached, point.new) == pytest.approx(point.seconds)


@given(cached=st.integers(min_value=0, max_value=50_000), new=st.integers(min_value=1, max_value=50_000))
def test_long_prompts_are_not_taken_for_cheap(cached: int, new: int) -> None:
    """Far outside of the grid attention dominates; a straight line would be several times too low."""
    estimate = Estimator.of(make_profile())
    assert estimate.prefill.seconds(cached, new) == pytest.approx(prefill_s(cached, new), rel=0.01)


def test_grid_with_a_hole_is_still_used() -> None:
    points = make_profile().prefill
    curve = PrefillCurve.fit([point for point in points if (point.cached, point.new) != (512, 1536)])
    assert curve.seconds(512, 1536) == pytest.approx(prefill_s(512, 1536), rel=0.01)


def test_nothing_new_takes_no_time(estimate: Estimator) -> None:
    assert estimate.prefill.seconds(100, 0) == 0


@given(
    cached=st.integers(min_value=1, max_value=8000),
    fresh=st.integers(min_value=0, max_value=4000),
    ratio=st.floats(min_value=0, max_value=1),
)
def test_recomputing_is_estimated_rightly(cached: int, fresh: int, ratio: float) -> None:
    estimate = Estimator.of(make_profile())
    assert estimate.recompute.seconds(cached, fresh, ratio) == pytest.approx(
        recompute_s(cached, fresh, ratio), rel=0.01
    )


MEASURED = st.tuples(st.integers(1, 10_000), st.integers(1, 10_000), st.floats(1e-4, 1e3))


@given(st.lists(MEASURED, min_size=3, max_size=12))
def test_no_time_is_ever_negative(points: list[tuple[int, int, float]]) -> None:
    """Whatever was measured: a negative cost would make some prompt look free."""
    fitted = fit_times([(1.0, a, a * b) for a, b, _ in points], [seconds for _, _, seconds in points])
    assert min(fitted) >= 0 and max(fitted) > 0
    assert evaluate(fitted, (1.0, 0.0, 0.0)) >= 0


def test_small_times_count_as_much_as_large_ones() -> None:
    """One point a thousand times the others must not decide alone."""
    fitted = fit_times([(1, 1), (1, 2), (1, 3), (1, 4000)], [2.0, 3.0, 4.0, 6000.0])
    assert evaluate(fitted, (1, 2)) == pytest.approx(3, rel=0.35)


def test_load_is_latency_times_calls_plus_bytes_over_throughput(estimate: Estimator) -> None:
    for tier, speed in SPEEDS.items():
        assert estimate.load_s(10**9, tier) == pytest.approx(LATENCY[tier] * (LAYERS + 1) + 1e9 / speed)
    assert estimate.load_s(0, "object") == 0
    with pytest.raises(KeyError):
        estimate.load_s(1, "tape")


@given(load=SECONDS, recompute=SECONDS, layers=st.integers(min_value=1, max_value=128))
def test_estimate_is_not_below_what_a_pipeline_of_equal_layers_takes(
    load: float, recompute: float, layers: int
) -> None:
    loaded = done = 0.0
    for _ in range(layers):
        loaded += load / layers
        done = max(done, loaded) + recompute / layers
    assert pipelined_s(load, recompute, layers) == pytest.approx(done)


@given(load=SECONDS, recompute=SECONDS, ratio=st.floats(min_value=0.01, max_value=0.99))
def test_loading_is_not_hidden_from_a_selector_that_waits_for_all_of_it(
    load: float, recompute: float, ratio: float
) -> None:
    assert READER.blend_s(load, recompute, ratio) == pytest.approx(OVERHEAD_S + load + recompute)
    hidden = OVERHEAD_S + pipelined_s(load, recompute, LAYERS)
    assert HKVD.blend_s(load, recompute, ratio) == pytest.approx(hidden)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_loading_that_no_selector_waits_for_is_not_added(ratio: float) -> None:
    assert READER.blend_s(2.0, 1.0, ratio) == HKVD.blend_s(2.0, 1.0, ratio) < OVERHEAD_S + 3.0


def test_no_selector_that_reads_the_question_is_taken_for_a_pipelined_one() -> None:
    for name in SELECTORS:
        assert Estimator.of(make_profile(selector=name)).reads_question == (name == "query"), name
