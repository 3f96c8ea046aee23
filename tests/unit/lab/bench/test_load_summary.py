"""The numbers of a load, from times that are known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.engine.wire.report import BlendReport
from blendrag.errors import ConfigError
from blendrag.lab.bench.open_loop import Alone, LoadArm, Run, compare_arms, overlap_share, summarise_run
from blendrag.lab.bench.timed import Timed
from blendrag.lab.statistics import Percentiles


def request(due: float, first: float | None, gap: float = 0.5, tokens: int = 3) -> Timed:
    """Tokens ``gap`` apart, the last of which ends it; cut off before its first if that is None."""
    if first is None:
        return Timed(due, due)
    times = [first + number * gap for number in range(tokens)]
    return Timed(due, due + 0.1, times, times[-1])


def test_waiting_begins_when_a_request_is_due() -> None:
    run = summarise_run(1, [request(1, 3), request(2, 4)], 0, 10, 10)
    assert run.ttft_ms == Percentiles(2000, 2000, 2000)
    assert run.itl_ms == Percentiles(500, 500, 500)


def test_request_that_never_had_a_token_is_counted() -> None:
    run = summarise_run(1, [request(1, 2), request(2, None)], 0, 10, 12)
    assert run.ttft_ms.max == 10_000 and run.requests == 2 and run.unfinished == 1


def test_warm_up_is_left_out_but_for_what_it_completes_later() -> None:
    run = summarise_run(1, [request(1, 8), request(5, 6), request(7, 9.5)], 4, 10, 20)
    assert run.requests == 2 and run.arrived_per_s == pytest.approx(2 / 6)
    assert run.completed_per_s == pytest.approx(2 / 6)  # ends at 9, 7; the third at 10.5
    assert run.ttft_ms.max == 2500
    assert run.saturated == pytest.approx((1 + 1) / 6)  # 5 to 6, and 7 to 8


def test_request_that_was_not_blended_does_not_pass_for_a_blend() -> None:
    requests = [request(1, 2) for _ in range(4)]
    reports = (BlendReport(), BlendReport(missing={"key": "gone"}), BlendReport(fallback="no room"), None)
    for each, report in zip(requests, reports, strict=True):
        each.report = report
    assert summarise_run(1, requests, 0, 10, 10).not_blended == 2


def test_answers_of_one_token_have_no_latency_between_tokens() -> None:
    assert summarise_run(1, [request(1, 2, tokens=1)], 0, 10, 10).itl_ms is None


def test_run_without_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="--seconds"):
        summarise_run(1, [request(1, 2)], 3, 10, 10)


WAITS = st.lists(st.tuples(st.integers(-5, 25), st.integers(0, 10)).map(lambda w: (w[0], w[0] + w[1])))


@given(waits=WAITS)
def test_share_of_time_with_a_queue_is_what_counting_gives(waits: list[tuple[int, int]]) -> None:
    seconds = range(20)
    queued = sum(sum(start <= at < stop for start, stop in waits) >= 2 for at in seconds)
    assert overlap_share(waits, 0, 20) == pytest.approx(queued / 20)


def run(done: float, p95: float) -> Run:
    return Run(done, 9, 0, 0, 0.0, 0.0, Percentiles(p95, p95, p95), [p95], None, done, done, 0.0)


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
