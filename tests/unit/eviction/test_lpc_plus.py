"""Learned eviction of chunks: the model, the policy, and what keeps it from harm."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from blendrag.eviction import EvictionPolicy, Use, make_policy
from blendrag.eviction import hazard as hazards
from blendrag.eviction.hazard import FEATURES, TOP, Hazard, gittins
from blendrag.eviction.lpc_plus import LPCPlus
from blendrag.eviction.lru import LRU

AGES = (0.0, 10.0, 100.0, 1000.0)


def model(feature: str, *rows: tuple[float, float, float], prefix: bool = False) -> Hazard:
    """Uses a second in the three steps, for feature values below 1, from 1 to 2, and so on."""
    logs = np.log(np.array(rows))
    borders = {feature: tuple(float(i) for i in range(1, len(rows)))}
    return Hazard(AGES, borders, np.diff(logs, axis=0), logs[0], prefix)


def use(at: float, depth: int = 0, length: int = 1, known: int = 0) -> Use:
    return Use(at, None, depth, length, known)


def order(policy: EvictionPolicy) -> list[str]:
    """In which order all would leave."""
    left = []
    while (key := policy.victim()) is not None:
        policy.removed(key)
        left.append(key)
    return left


CALL = st.tuples(st.sampled_from("aurvf"), st.sampled_from("abcdef"), st.floats(allow_infinity=False))


@given(st.lists(CALL, max_size=60))
def test_without_a_model_it_is_lru(calls: list[tuple[str, str, float]]) -> None:
    lru, policy = LRU(), make_policy("lpc+")
    for call, key, number in calls:
        for one in (lru, policy):
            if call == "a":
                one.added(key, 5, use(number))
            elif call == "u":
                one.used(key, use(number))
            elif call == "r":
                one.removed(key)
            elif call == "f":
                one.forecast(key, number, 0.0)
        assert policy.victim() == lru.victim()


def four(low: float, high: float) -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(low, high), min_size=4, max_size=4)


@given(four(0.001, 0.5), four(1.0, 50.0))
def test_index_is_that_of_the_best_plan(rates: list[float], steps: list[float]) -> None:
    found = gittins(rates, steps)
    for start in range(4):
        plans = []
        for end in range(start, 4):
            alive, uses, kept = 1.0, 0.0, 0.0
            for rate, step in zip(rates[start : end + 1], steps[start : end + 1], strict=True):
                chance = 1.0 - np.exp(-rate * step)
                uses += alive * chance
                kept += alive * chance / rate  # the integral of exp(-rate t) over the step
                alive *= 1.0 - chance
            plans.append(uses / kept)
        assert found[start] == pytest.approx(max(plans))


def test_order_changes_with_time() -> None:
    """A pause of a minute is usual: after it, chances fall."""
    policy = LPCPlus(model("depth", (0.001, 0.05, 0.0001), (0.01, 0.01, 0.01)))
    policy.added("soon", 1, use(0.0, depth=0))
    policy.added("some day", 1, use(0.0, depth=1))
    assert policy.victim() == "some day"
    policy.added("other", 1, use(150.0, depth=0))  # "soon" is past its best time now
    assert policy.victim() == "soon"
    policy.added("other", 1, use(1200.0, depth=0))  # nothing is known of either any more
    assert order(policy) == ["soon", "some day", "other"]


def test_chunk_leaves_after_those_behind_it() -> None:
    never, often = (0.01, 0.01, 0.01), (0.5, 0.5, 0.5)
    policy = LPCPlus(model("count", never, never, often, prefix=True))
    policy.added("tail", 1, use(0.0, 1, 2, 2))
    policy.used("tail", use(1.0, 1, 2, 2))
    policy.added("head", 1, use(1.0, 0, 2, 2))
    policy.added("one", 1, use(3.0))
    assert order(policy) == ["one", "tail", "head"]


def test_chunks_that_stand_alone_do_not_lift_each_other() -> None:
    taught = model("count", (0.01, 0.01, 0.01), (0.01, 0.01, 0.01), (0.5, 0.5, 0.5), prefix=False)
    policy = LPCPlus(taught)
    policy.added("liked", 1, use(0.0, 1, 2))
    policy.used("liked", use(1.0, 1, 2))
    policy.added("beside it", 1, use(1.0, 0, 2))
    policy.added("one", 1, use(3.0))
    assert order(policy) == ["beside it", "one", "liked"]


def test_forecast_changes_the_order_and_nonsense_does_not() -> None:
    # Nobody said: middling; below 0.5: low; above: high.
    weights = np.array([[-3.0] * 3, [6.0] * 3])
    policy = LPCPlus(Hazard(AGES, {"continues": (0.0, 0.5)}, weights, np.full(3, -3.0), prefix=False))
    for key in "abc":
        policy.added(key, 1, use(0.0))
    policy.forecast("a", 0.9, 1.0)
    policy.forecast("b", 0.1, 1.0)
    policy.forecast("b", 0.9, 1.0)
    policy.forecast("b", 0.2, 1.0)  # another conversation's: the highest counts
    policy.forecast("c", 0.1, 1.0)
    for nonsense in (float("nan"), -1.0, 7.0, float("inf")):
        policy.forecast("c", nonsense, 1.0)
    policy.forecast("nobody", 0.9, 1.0)
    assert order(policy) == ["c", "a", "b"]


def test_chunk_that_came_back_counts_as_known() -> None:
    policy = LPCPlus(model("count", (0.01, 0.01, 0.01), (0.01, 0.01, 0.01), (0.5, 0.5, 0.5)))
    policy.added("again", 1, use(0.0))
    policy.removed("again")
    policy.added("again", 1, use(5.0))
    policy.added("new", 1, use(6.0))
    assert order(policy) == ["new", "again"]


def replay(policy: EvictionPolicy, keys: NDArray[np.int64], room: int) -> NDArray[np.bool_]:
    """Which of the uses found their key."""
    held, found = set[str](), np.zeros(len(keys), bool)
    for at, key in enumerate(map(str, keys)):
        found[at] = key in held
        if found[at]:
            policy.used(key, use(float(at)))
            continue
        if len(held) == room:
            victim = policy.victim()
            assert victim is not None
            policy.removed(victim)
            held.discard(victim)
        policy.added(key, 1, use(float(at)))
        held.add(key)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_model_of_another_world_soon_does_no_more_harm(seed: int) -> None:
    """It learned that what was used once more is never used again; here it is the other way round."""
    rng = np.random.default_rng(seed)
    liked, passing = rng.zipf(1.3, 16_000) % 1500, np.arange(16_000) + 10_000
    keys = np.where(rng.random(16_000) < 0.5, liked, passing)
    wrong = model("count", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), (0.001, 0.001, 0.001))
    policy = LPCPlus(wrong)
    found, lru = replay(policy, keys, 250), replay(LRU(), keys, 250)
    assert not policy.learned
    windows = found.reshape(10, -1).mean(axis=1), lru.reshape(10, -1).mean(axis=1)
    behind = windows[0] < 0.97 * windows[1]
    assert not any(one and other for one, other in pairwise(behind)), windows
    assert not behind[5:].any(), windows


def test_good_model_is_believed() -> None:
    rng = np.random.default_rng(0)
    liked, passing = rng.integers(0, 300, 16_000), np.arange(16_000) + 10_000
    keys = np.where(rng.random(16_000) < 0.5, liked, passing)
    right = model("count", (0.01, 0.01, 0.001), (0.01, 0.01, 0.001), (0.1, 0.4, 0.5))
    policy = LPCPlus(right)
    found, lru = replay(policy, keys, 250), replay(LRU(), keys, 250)
    assert policy.learned
    assert found[8_000:].mean() > 1.3 * lru[8_000:].mean() > 0.0


def test_no_more_cases_are_remembered_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hazards, "_CASES", 3)
    taught = model("depth", *[(0.1, 0.1, 0.1)] * 9)
    features = [tuple(float(depth) if name == "depth" else 0.0 for name in FEATURES) for depth in range(9)]
    for one in features:
        assert len(taught.levels(taught.case(one))) == len(AGES)
    assert taught.levels.cache_info().currsize <= 3


@given(st.floats(), st.floats(0.0, 1.0))
def test_every_level_is_within_the_scale(value: float, chance: float) -> None:
    edge = min(max(chance, 1e-12), 1.0 - 1e-12)
    taught = model("depth", (edge, edge, edge), (0.5, 0.5, 0.5))
    *levels, after = taught.levels(taught.case(tuple(value if n == "depth" else 0.0 for n in FEATURES)))
    assert after == 0 and all(1 <= level <= TOP for level in levels)
