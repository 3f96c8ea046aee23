"""The numbers of the benchmark: spread, divergence, the summary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.lab.arms import Sample
from blendrag.lab.statistics import Spread, next_token_kl, spread, summarise


def logprobs(weights: list[float], rest: float, first: int = 0) -> dict[int, float]:
    total = sum(weights) + rest
    return {first + i: math.log(weight / total) for i, weight in enumerate(weights)}


WEIGHTS = st.lists(st.floats(0.01, 10), min_size=1, max_size=25)
REST = st.floats(0.001, 10)


@given(WEIGHTS, REST)
def test_the_same_distribution_does_not_diverge(weights: list[float], rest: float) -> None:
    same = logprobs(weights, rest)
    assert next_token_kl(same, same) == pytest.approx(0, abs=1e-6)


@given(WEIGHTS, REST, WEIGHTS, REST, st.integers(0, 30))
def test_divergence_is_never_negative_nor_infinite(
    p: list[float], p_rest: float, q: list[float], q_rest: float, shift: int
) -> None:
    assert 0 <= next_token_kl(logprobs(p, p_rest), logprobs(q, q_rest, shift)) < 60


def test_divergence_is_the_textbook_one_over_top_tokens_and_the_rest() -> None:
    p, q = {1: math.log(0.5), 2: math.log(0.3)}, {1: math.log(0.4), 2: math.log(0.2)}
    expected = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.2) + 0.2 * math.log(0.2 / 0.4)
    assert next_token_kl(p, q) == pytest.approx(expected)


def test_only_the_top_tokens_of_the_reference_count() -> None:
    p, q = logprobs([5, 3, 1], 1), logprobs([5, 3, 1e-9], 2 - 1e-9)
    assert next_token_kl(p, q, top=2) == pytest.approx(0, abs=1e-9)


def test_tokens_that_the_other_side_does_not_list_are_not_taken_for_agreement() -> None:
    assert next_token_kl(logprobs([8, 1], 1), logprobs([8, 1], 1, first=100)) > 1


def test_unlikely_token_that_was_forced_makes_no_other_token_as_unlikely() -> None:
    """An engine lists a forced token, such as the right answer's, beside the likeliest."""
    p, q = logprobs([8.0, 3, 2], 3), logprobs([8.0, 3, 2], 3, first=1)
    forced = {99: math.log(1e-9)}
    assert next_token_kl({**p, **forced}, {**q, **forced}, top=3) == pytest.approx(next_token_kl(p, q, top=3))


def test_certainty_on_both_sides_does_not_divide_by_zero() -> None:
    assert next_token_kl({1: 0.0}, {1: 0.0, 2: -50.0}) == pytest.approx(0)
    assert math.isfinite(next_token_kl({1: 0.0}, {2: 0.0}))


def test_spread_is_not_minimum_and_maximum_and_of_one_sample_is_that_sample() -> None:
    assert spread([3.0]) == Spread(median=3.0, p10=3.0, p90=3.0)
    assert spread([float(i) for i in range(11)]) == Spread(median=5.0, p10=1.0, p90=9.0)


def samples(ttft_ms: Sequence[float], token: int = 7, **split: float) -> list[Sample]:
    return [Sample(ms, token, {token: -0.1}, 7, split) for ms in ttft_ms]


def test_speed_up_is_against_each_rival_repeat_by_repeat() -> None:
    times = {"full": [200, 400], "prefix": [100, 200], "blended": [100, 100]}
    found = summarise({name: samples(own) for name, own in times.items()}, ("full", "prefix"))
    blended = found["blended"]
    assert list(found) == ["full", "prefix", "blended"] and list(blended.speedup) == ["full", "prefix"]
    assert blended.ttft_ms.median == 100 and blended.each_ms == [100, 100]
    assert astuple(blended.speedup["full"]) == pytest.approx((3, 2.2, 3.8))
    assert blended.speedup["prefix"].median == 1.5
    assert blended.kl_first_token == 0 and blended.tokens_recomputed == 7


def test_split_adds_up_to_the_median_ttft() -> None:
    own = samples([50, 51, 52, 53], load=3.0, select=1.0, recompute=20.0)
    arm = summarise({"full": samples([100.0] * 4), "blend@0.15": own})["blend@0.15"]
    assert set(arm.split_ms) == {"load", "select", "recompute", "engine"}
    assert sum(arm.split_ms.values()) == pytest.approx(arm.ttft_ms.median)


def test_agreement_is_the_share_of_repeats_with_the_same_first_token() -> None:
    reuse = [*samples([1.0] * 4)[:3], samples([1.0] * 4, token=8)[3]]
    found = summarise({"full": samples([1.0] * 4), "reuse": reuse})
    assert found["full"].top1_agreement == 1.0 and found["full"].kl_first_token == 0.0
    assert found["reuse"].top1_agreement == 0.75 and found["reuse"].kl_first_token > 0
