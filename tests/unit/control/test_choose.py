"""The controller's choices, on machines whose times are known."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.control.choose import MIN_RATIO, ChunkCost, cheapest_tier, decide, ratio_for
from blendrag.control.estimate import Estimator
from blendrag.control.profile import TierSpeed
from paper_machine import SPEEDS, make_profile

PER_TOKEN = 23_040  # bytes of KV: 30 layers of 3 heads of 64, K and V in bfloat16
HKVD, READER = (Estimator.of(make_profile(selector=name)) for name in ("hkvd", "query"))

CHUNKS = st.lists(
    st.builds(
        lambda tokens, factor, tier: ChunkCost(tokens, int(tokens * PER_TOKEN * factor), tier),
        st.integers(min_value=1, max_value=2000),
        st.floats(min_value=0.2, max_value=2),
        st.sampled_from([*SPEEDS, "never measured"]),
    ),
    max_size=12,
)
RATIOS = st.none() | st.floats(min_value=0, max_value=1)
TOKENS = st.integers(min_value=1, max_value=8000)
SPEED = st.floats(min_value=1e4, max_value=1e12)


def of_tier(bytes_per_s: float, latency_s: float = 0.0, selector: str = "hkvd") -> Estimator:
    speed = TierSpeed(bytes_per_s=bytes_per_s, latency_s=latency_s, calls=31, measured_at="now")
    return Estimator.of(make_profile(tiers={"only": speed}, selector=selector))


def chunks(count: int, tier: str) -> list[ChunkCost]:
    return [ChunkCost(512, 512 * PER_TOKEN, tier)] * count


# -- mode A


@given(cached=TOKENS, fresh=TOKENS)
def test_fast_tier_lowers_the_ratio_to_the_least(cached: int, fresh: int) -> None:
    assert ratio_for(of_tier(1e12), cached * PER_TOKEN / 1e12, cached, fresh) == MIN_RATIO


@given(
    cached=TOKENS,
    fresh=TOKENS,
    loads=st.lists(st.floats(min_value=0, max_value=20), min_size=2),
    least=st.sampled_from([0.0, MIN_RATIO, 0.6, 1.0]),
)
def test_slower_tier_never_gets_a_lower_ratio(
    cached: int, fresh: int, loads: list[float], least: float
) -> None:
    estimate = of_tier(1e9)
    ratios = [ratio_for(estimate, load, cached, fresh, least) for load in sorted(loads)]
    assert ratios == sorted(ratios)
    assert min(ratios) >= least and max(ratios) <= 1


@given(cached=TOKENS, fresh=TOKENS, share=st.floats(min_value=0.16, max_value=0.99))
def test_recomputing_ends_when_loading_does(cached: int, fresh: int, share: float) -> None:
    estimate = of_tier(1e9)
    load = estimate.recompute.seconds(cached, fresh, share)
    assert ratio_for(estimate, load, cached, fresh) == pytest.approx(share)


def test_ratio_that_costs_nothing_does_not_divide_by_zero() -> None:
    blend = [point.model_copy(update={"seconds": 0.1}) for point in make_profile().blend]
    estimate = Estimator.of(make_profile(blend=tuple(blend)))
    assert ratio_for(estimate, 0.0, 512, 64) == MIN_RATIO
    assert ratio_for(estimate, 1.0, 512, 64) == 1.0


@given(cached=TOKENS, fresh=TOKENS, load=st.floats(min_value=0, max_value=20), ratio=st.floats(0, 1))
def test_ratio_that_would_be_waited_for_is_not_bought(
    cached: int, fresh: int, load: float, ratio: float
) -> None:
    assert ratio_for(READER, load, cached, fresh, ratio) == ratio


# -- mode B


@given(cached=TOKENS, ratio=st.floats(min_value=0, max_value=1), selector=st.sampled_from(["hkvd", "query"]))
def test_lowest_tier_that_adds_no_delay_is_chosen(cached: int, ratio: float, selector: str) -> None:
    estimate = HKVD if selector == "hkvd" else READER
    nbytes, recompute = cached * PER_TOKEN, estimate.recompute.seconds(cached, 64, ratio)
    choice = cheapest_tier(estimate, nbytes, cached, 64, ratio)
    waits = not estimate.hides_loading(ratio)
    hidden = [tier for tier in SPEEDS if not waits and estimate.load_s(nbytes, tier) <= recompute]
    assert choice.tier == (hidden[-1] if hidden else None)
    assert hidden or "every tier adds delay" in choice.why


def test_slow_storage_is_chosen_only_where_computing_is_slower() -> None:
    nbytes = 3072 * PER_TOKEN
    assert cheapest_tier(HKVD, nbytes, 3072, 64, 0.15).tier == "redis"
    assert cheapest_tier(HKVD, nbytes, 3072, 64, 1.0).tier == "object"


def test_tier_that_everything_waits_for_is_said_to_add_delay() -> None:
    choice = cheapest_tier(READER, 3072 * PER_TOKEN, 3072, 64, 0.15)
    assert choice.tier is None and "reads the question" in choice.why and "ram" in choice.why
    everything = cheapest_tier(READER, 3072 * PER_TOKEN, 3072, 64, 1.0)
    assert everything.tier == "object", "where nothing is chosen, the question is not read first"


# -- mode C


@given(
    own=CHUNKS,
    fresh=st.integers(min_value=0, max_value=4000),
    ratio=RATIOS,
    speed=SPEED,
    selector=st.sampled_from(["hkvd", "query"]),
)
def test_blending_is_never_estimated_to_be_slower_than_plain_prefill(
    own: list[ChunkCost], fresh: int, ratio: float | None, speed: float, selector: str
) -> None:
    tiers = {name: found.model_copy(update={"bytes_per_s": speed * found.bytes_per_s / 1e9})
             for name, found in make_profile().tiers.items()}  # fmt: skip
    estimate = Estimator.of(make_profile(tiers=tiers, selector=selector))
    decision = decide(estimate, own, fresh, ratio)
    total = fresh + sum(chunk.tokens for chunk in own)
    assert decision.plain_s == estimate.prefill.seconds(0, total)
    assert decision.blend_s <= decision.plain_s
    assert len(decision.load) == len(own)
    if any(decision.load):
        assert decision.blend_s < decision.plain_s
        assert 0 <= decision.ratio < 1 and (ratio is not None or decision.ratio >= MIN_RATIO)
    else:
        assert decision.blend_s == decision.plain_s and decision.ratio == 1


@given(own=CHUNKS, fresh=st.integers(0, 4000), ratio=st.floats(min_value=0, max_value=0.99))
def test_loading_everything_is_never_estimated_to_be_faster(
    own: list[ChunkCost], fresh: int, ratio: float
) -> None:
    estimate = HKVD
    known = [chunk for chunk in own if chunk.tier in SPEEDS]
    decision = decide(estimate, known, fresh, ratio)
    if known:
        load = sum(
            estimate.load_s(sum(chunk.nbytes for chunk in known if chunk.tier == tier), tier)
            for tier in {chunk.tier for chunk in known}
        )
        everything = estimate.recompute.seconds(sum(chunk.tokens for chunk in known), fresh, ratio)
        assert decision.blend_s <= estimate.blend_s(load, everything, ratio) + 1e-9


def test_loading_that_is_not_hidden_is_not_chosen_as_if_it_were() -> None:
    """In 0.9 of plain prefill's time: that pays where layers overlap, and not where they wait."""
    own = chunks(6, "only")
    plain = of_tier(1e9).prefill.seconds(0, 64 + 6 * 512)
    speed = 3072 * PER_TOKEN / (0.9 * plain)
    hkvd, reader = (decide(of_tier(speed, selector=name), own, 64, 0.15) for name in ("hkvd", "query"))
    assert any(hkvd.load) and hkvd.blend_s < plain
    assert not any(reader.load) and reader.blend_s == plain


def test_fast_tier_is_loaded_at_the_least_ratio() -> None:
    decision = decide(Estimator.of(make_profile()), chunks(6, "ram"), 64, None)
    assert decision.load == (True,) * 6 and decision.ratio == MIN_RATIO
    assert decision.blend_s < decision.plain_s / 3


def test_hopeless_tier_is_not_loaded_from() -> None:
    decision = decide(of_tier(1e6), chunks(6, "only"), 64, None)
    assert decision.load == (False,) * 6 and "plain prefill" in decision.why


def test_chunks_that_would_all_be_recomputed_are_not_loaded() -> None:
    """Not even where that is measured to be faster than plain prefill."""
    blend = [point.model_copy(update={"seconds": 1e-3}) for point in make_profile().blend]
    estimate = Estimator.of(make_profile(blend=tuple(blend)))
    assert any(decide(estimate, chunks(6, "ram"), 64, 0.99).load)
    decision = decide(estimate, chunks(6, "ram"), 64, 1.0)
    assert decision.load == (False,) * 6 and decision.blend_s == decision.plain_s


def test_one_slow_chunk_does_not_keep_the_others_waiting() -> None:
    slow = make_profile().tiers["object"].model_copy(update={"bytes_per_s": 1e6})
    estimate = Estimator.of(make_profile(tiers=make_profile().tiers | {"object": slow}))
    mixed = [*chunks(2, "ram"), *chunks(1, "object"), *chunks(2, "disk")]
    decision = decide(estimate, mixed, 64, 0.15)
    assert decision.load == (True, True, False, True, True)
    assert decision.why.startswith("4 of 5 chunks")


def test_unmeasured_tier_is_taken_for_the_slowest(estimate: Estimator) -> None:
    unknown, slowest = (decide(estimate, chunks(6, t), 64, None) for t in ("tape", "object"))
    assert (unknown.load, unknown.blend_s) == (slowest.load, slowest.blend_s)


def test_decision_does_not_cost_the_request_a_millisecond(estimate: Estimator) -> None:
    own = [*chunks(6, "ram"), *chunks(6, "disk")]

    def once() -> float:
        begin = time.perf_counter()
        decide(estimate, own, 64, None)
        return time.perf_counter() - begin

    assert min(once() for _ in range(50)) < 1e-3
