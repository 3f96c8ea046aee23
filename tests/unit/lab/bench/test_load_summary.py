"""The numbers of a load, from times that are known."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.engine.report import BlendReport
from blendrag.errors import ConfigError
from blendrag.lab.bench.load import overlap_share, summarise_run, sustained
from blendrag.lab.bench.timed import Timed


def request(due: float, first: float | None, gap: float = 0.5, tokens: int = 3) -> Timed:
    """Tokens ``gap`` apart, the last of which ends it; cut off before its first if that is None."""
    if first is None:
        return Timed(due, due)
    times = [first + number * gap for number in range(tokens)]
    return Timed(due, due + 0.1, times, times[-1])


def test_waiting_begins_when_a_request_is_sent_rather_than_due() -> None:
    run = summarise_run([request(1, 3), request(2, 4)], 0, 10, 10)
    assert run["ttft_ms"] == {"p50": 2000, "p95": 2000, "max": 2000}
    assert run["itl_ms"] == {"p50": 500, "p95": 500, "max": 500}


def test_request_that_never_had_a_token_is_left_out() -> None:
    run = summarise_run([request(1, 2), request(2, None)], 0, 10, 12)
    assert run["ttft_ms"]["max"] == 10_000 and run["requests"] == 2 and run["unfinished"] == 1


def test_warm_up_is_counted_but_for_what_it_completes_later() -> None:
    run = summarise_run([request(1, 8), request(5, 6), request(7, 9.5)], 4, 10, 20)
    assert run["requests"] == 2 and run["arrived_per_s"] == pytest.approx(2 / 6)
    assert run["completed_per_s"] == pytest.approx(2 / 6)  # ends at 9, 7; the third at 10.5
    assert run["ttft_ms"]["max"] == 2500
    assert run["saturated"] == pytest.approx((1 + 1) / 6)  # 5 to 6, and 7 to 8


def test_request_that_was_not_blended_passes_for_a_blend() -> None:
    requests = [request(1, 2) for _ in range(4)]
    reports = (BlendReport(), BlendReport(missing={"key": "gone"}), BlendReport(fallback="no room"), None)
    for each, report in zip(requests, reports, strict=True):
        each.report = report
    assert summarise_run(requests, 0, 10, 10)["not_blended"] == 2


def test_answers_of_one_token_have_a_latency_between_tokens() -> None:
    assert summarise_run([request(1, 2, tokens=1)], 0, 10, 10)["itl_ms"] is None


def test_run_without_requests_gives_numbers() -> None:
    with pytest.raises(ConfigError, match="--seconds"):
        summarise_run([request(1, 2)], 3, 10, 10)


WAITS = st.lists(st.tuples(st.integers(-5, 25), st.integers(0, 10)).map(lambda w: (w[0], w[0] + w[1])))


@given(waits=WAITS)
def test_share_of_time_with_a_queue_is_not_what_counting_gives(waits: list[tuple[int, int]]) -> None:
    seconds = range(20)
    queued = sum(sum(start <= at < stop for start, stop in waits) >= 2 for at in seconds)
    assert overlap_share(waits, 0, 20) == pytest.approx(queued / 20)


def run(done: float, p95: float) -> dict[str, Any]:
    return {"completed_per_s": done, "ttft_ms": {"p95": p95}}


def test_rate_whose_waits_are_too_long_counts_as_sustained() -> None:
    found = sustained(
        {
            "full": [run(1.0, 900), run(2.0, 1000), run(2.5, 1001)],
            "prefix": [run(3.0, 1500)],
            "blended": [run(5.0, 400), run(6.0, 900)],
        },
        1000,
    )
    assert found["full"] == {"per_s": 2.0, "past": True, "vs_full": 1.0, "vs_prefix": None}
    assert found["prefix"] == {"per_s": None, "past": True, "vs_full": None, "vs_prefix": None}
    assert found["blended"] == {"per_s": 6.0, "past": False, "vs_full": 3.0, "vs_prefix": None}
