"""When requests are sent, and the numbers of a load, from times that are known."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.engine.wire.report import BlendReport
from blendrag.errors import ConfigError
from blendrag.lab.bench.open_loop import Alone, LoadArm, Run, arrival_times, compare_arms, summarise_run
from blendrag.lab.bench.timed import Timed
from blendrag.lab.statistics import Percentiles


def request(due: float, first: float | None) -> Timed:
    """Three tokens, the last of which ends it; cut off before its first if that is None."""
    if first is None:
        return Timed(due, due)
    times = [first + number * 0.5 for number in range(3)]
    return Timed(due, due + 0.1, times, times[-1])


def test_waiting_begins_when_a_request_is_due() -> None:
    run = summarise_run(1, [request(1, 3), request(2, 4)], 0, 10, 10)
    assert run.ttft_ms == Percentiles(2000, 2000, 2000)


def test_request_that_never_had_a_token_is_counted() -> None:
    answered = request(1, 2)
    answered.reused = 128
    run = summarise_run(1, [answered, request(2, None)], 0, 10, 12)
    assert run.ttft_ms.max == 10_000 and run.requests == 2
    assert run.reused_tokens == 128, "what it would have reused is not known"


def test_warm_up_is_left_out_but_for_what_it_completes_later() -> None:
    run = summarise_run(1, [request(1, 8), request(5, 6), request(7, 9.5)], 4, 10, 20)
    assert run.requests == 2
    assert run.completed_per_s == pytest.approx(2 / 6)  # ends at 9, 7; the third at 10.5
    assert run.ttft_ms.max == 2500


def test_request_that_was_not_blended_does_not_pass_for_a_blend() -> None:
    requests = [request(1, 2) for _ in range(4)]
    reports = (BlendReport(), BlendReport(missing={"key": "gone"}), BlendReport(fallback="no room"), None)
    for each, report in zip(requests, reports, strict=True):
        each.report = report
    assert summarise_run(1, requests, 0, 10, 10).not_blended == 2


def test_run_without_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="--seconds"):
        summarise_run(1, [request(1, 2)], 3, 10, 10)


def run(done: float, p95: float) -> Run:
    return Run(done, 9, 0, 0.0, 0.0, Percentiles(p95, p95, p95), [p95], done)


def test_rate_whose_waits_are_too_long_does_not_count_as_sustained() -> None:
    runs = {
        "full": [run(1.0, 900), run(2.0, 1000), run(2.5, 1001)],
        "prefix": [run(3.0, 1500)],
        "blended": [run(5.0, 400), run(6.0, 900)],
    }
    alone = dict.fromkeys(runs, Alone(500, 600, [500]))
    found = compare_arms(alone, runs, 1000)
    assert found["full"] == LoadArm(alone["full"], runs["full"], 2.0, True, 1.0, None)
    assert found["prefix"] == LoadArm(alone["full"], runs["prefix"], None, True, None, None)
    assert found["blended"] == LoadArm(alone["full"], runs["blended"], 6.0, False, 3.0, None)


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
