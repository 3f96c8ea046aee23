"""What every policy owes to the tier that asks it, and what each of them promises."""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from blendrag.eviction import POLICIES, EvictionPolicy, Use, make_policy
from blendrag.eviction.gdsf import PGDSF, Counts
from blendrag.eviction.hazard import Hazard
from blendrag.eviction.lpc import LPC, SCALE
from blendrag.eviction.lpc_plus import LPCPlus

BUILT_IN = sorted(POLICIES)
TAUGHT = ["taught", "taught by prefixes"]
KEYS = [f"k{i}" for i in range(6)]
NAN = float("nan")


def made(name: str) -> EvictionPolicy:
    if name not in TAUGHT:
        return make_policy(name)
    weights, bias = np.array([[1.0, -1.0, -1.0]]), np.log([0.1, 0.2, 0.3])
    return LPCPlus(Hazard((0.0, 10.0, 100.0, 1000.0), {"count": (1.0,)}, weights, bias, name != "taught"))


def holding(policy: EvictionPolicy, *keys: str) -> EvictionPolicy:
    for key in keys:
        policy.added(key, 1, Use(0.0))
    return policy


def drained(policy: EvictionPolicy) -> list[str]:
    """All keys, in the order in which they leave."""
    keys = []
    while (key := policy.victim()) is not None:
        policy.removed(key)
        keys.append(key)
    return keys


@pytest.mark.parametrize("name", [*BUILT_IN, *TAUGHT])
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["added", "used", "removed", "forecast", "evict"]),
            st.sampled_from(KEYS),
            st.floats(allow_nan=True, allow_infinity=True),
        ),
        max_size=50,
    )
)
def test_victim_is_a_chunk_that_is_held_and_none_is_forgotten(
    name: str, calls: list[tuple[str, str, float]]
) -> None:
    """Whatever the clock, the costs and the forecasts are."""
    policy, held = made(name), set()
    for call, key, number in calls:
        match call:
            case "added":
                policy.added(key, 7, Use(number, cost=number))
                held.add(key)
            case "used":
                policy.used(key, Use(number, cost=number))
            case "removed":
                policy.removed(key)
                held.discard(key)
            case "forecast":
                policy.forecast(key, number, number)
            case "evict" if (victim := policy.victim()) is not None:
                assert policy.victim() == victim, "asking changes nothing"
                policy.removed(victim)
                held.remove(victim)
    assert sorted(drained(policy)) == sorted(held)


@pytest.mark.parametrize("name", BUILT_IN)
@given(st.lists(st.tuples(st.sampled_from(KEYS), st.booleans()), max_size=40), st.sets(st.sampled_from(KEYS)))
def test_chunk_that_may_not_leave_stays_and_others_leave_in_their_order(
    name: str, calls: list[tuple[str, bool]], stay: set[str]
) -> None:
    policy, held = make_policy(name), set()
    for at, (key, new) in enumerate(calls):
        if new:
            policy.added(key, 7, Use(at))
            held.add(key)
        else:
            policy.used(key, Use(at))
    left = []
    while (key := policy.victim(lambda key: key not in stay)) is not None:
        policy.removed(key)
        left.append(key)
    assert sorted(left) == sorted(held - stay)
    assert sorted(drained(policy)) == sorted(held & stay)


@pytest.mark.parametrize("name", BUILT_IN)
def test_policy_that_knows_nothing_but_the_order_of_one_use_each_is_lru(name: str) -> None:
    assert drained(holding(make_policy(name), *KEYS)) == KEYS


@given(
    st.lists(st.tuples(st.sampled_from(KEYS), st.floats(0, 1e6)), max_size=60), st.none() | st.floats(0, 1)
)
def test_lpc_that_hears_nothing_or_the_same_of_all_is_lru(
    uses: list[tuple[str, float]], p: float | None
) -> None:
    """The last use's forecast is still to come: chunks leave before it does."""
    lpc, order = LPC(), OrderedDict[str, None]()
    now = 0.0
    for place, (key, gap) in enumerate(uses):
        now += gap
        (lpc.used if key in order else lambda key, use: lpc.added(key, 1, use))(key, Use(now))
        order[key] = None
        order.move_to_end(key)
        if p is not None and place < len(uses) - 1:
            lpc.forecast(key, p, now, f"of {key}")
    assert drained(lpc) == list(order)


@given(st.integers(0, 2**32), st.integers(0, 5_000))
def test_line_in_logits_orders_chunks_as_the_papers_formula(seed: int, wait: int) -> None:
    """Section 3.4.2 and 3.5: each conversation's p decays since its last turn; a chunk has the maximum."""
    policy, rng = LPC(), random.Random(seed)
    spoken: dict[str, dict[str, tuple[float, float]]] = {}
    now = 0.0
    for _ in range(25):
        now += rng.expovariate(1 / 50)
        key, conversation, p = rng.choice(KEYS), rng.choice("abc"), rng.uniform(0.01, 0.99)
        if key in spoken:
            policy.used(key, Use(now))
        else:
            policy.added(key, 1, Use(now))
        policy.forecast(key, p, now, conversation)
        spoken.setdefault(key, {})[conversation] = (p, now)
    now += wait

    def decayed(p: float, last: float) -> float:
        d = math.exp(-(now - last) * SCALE)
        return p * d / (p * d + 1 - p)

    chance = {key: max(decayed(*one) for one in of.values()) for key, of in spoken.items()}
    left = [chance[key] for key in drained(policy)]
    assert all(first <= then * (1 + 1e-9) for first, then in pairwise(left))


@example(p=0.0)
@example(p=1.0)
@given(st.floats(0.0, 1.0))
def test_conversation_that_said_goodbye_falls_below_its_former_forecast(p: float) -> None:
    policy = holding(LPC(), "chunk", "other")
    policy.forecast("chunk", 1.0, 0.0, "talk")
    policy.forecast("chunk", p, 0.0, "talk")
    policy.forecast("other", 0.5, 0.0, "another talk")
    assert policy.victim() == ("chunk" if p < 0.5 else "other") or p == 0.5


def test_block_that_a_lively_conversation_shares_stays_when_the_other_ends() -> None:
    policy = holding(LPC(), "shared", "ended")
    policy.forecast("shared", 0.9, 0.0, "lively")
    for key in ("shared", "ended"):
        policy.forecast(key, 0.01, 1.0, "over")
    policy.added("even", 1, Use(1.0))
    assert drained(policy) == ["ended", "even", "shared"]


@pytest.mark.parametrize("nonsense", [NAN, -0.1, 1.1, math.inf])
def test_nonsense_for_a_forecast_moves_no_chunk(nonsense: float) -> None:
    policy = holding(LPC(), "first", "second")
    policy.forecast("first", nonsense, 0.0)
    assert policy.victim() == "first"


@pytest.mark.parametrize("back", [-1e9, NAN])
def test_clock_that_runs_backwards_does_not_age_what_was_just_used(back: float) -> None:
    policy = LPC()
    for at, key in ((100.0, "old"), (back, "new")):
        policy.added(key, 1, Use(at))
    assert drained(policy) == ["old", "new"]


def test_lfu_keeps_what_is_used_often_and_remembers_how_often_it_was() -> None:
    policy = holding(make_policy("lfu"), *"ab")
    policy.used("a", Use(1.0))
    assert policy.victim() == "b"
    policy.removed("a")
    policy.added("a", 1, Use(2.0))
    for _ in range(2):  # 3 uses, as a has
        policy.used("b", Use(3.0))
    assert policy.victim() == "a"


def test_gdsf_lets_go_of_what_was_popular_long_ago() -> None:
    policy = holding(make_policy("gdsf"), "once popular")
    for _ in range(4):
        policy.used("once popular", Use(0.0))
    evicted = []
    for number in range(8):
        policy.added(f"new {number}", 1, Use(1.0))
        evicted.append(policy.victim())
        policy.removed(str(evicted[-1]))
    assert evicted.index("once popular") == 4  # each eviction has raised Clock by 1, and 4 + 1 = 5


@given(st.lists(st.sampled_from([*KEYS, ""]), max_size=60))
def test_gdsfs_clock_is_the_highest_priority_that_left(calls: list[str]) -> None:
    """Equations 1 and 2. Each key is a use, "" an eviction."""
    policy, clock, held, uses = make_policy("gdsf"), 0, dict[str, int](), Counter[str]()
    for key in calls:
        if key:
            uses[key] += 1
            policy.used(key, Use(0.0)) if key in held else policy.added(key, 7, Use(0.0))
            held[key] = clock + uses[key]
        elif (victim := policy.victim()) is not None:
            assert held[victim] == min(held.values())
            policy.removed(victim)
            clock = max(clock, held.pop(victim))


def test_chunk_that_its_owner_deleted_leaves_gdsfs_clock_alone() -> None:
    policy = holding(make_policy("gdsf"), *"abc")
    for _ in range(9):
        policy.used("a", Use(0.0))
    assert policy.victim() == "b"
    policy.removed("a")  # of priority 10
    policy.used("b", Use(0.0))
    policy.added("d", 1, Use(0.0))
    assert drained(policy) == ["c", "d", "b"]


def test_chunk_that_was_evicted_and_came_back_leaves_gdsfs_clock_alone_when_it_is_deleted() -> None:
    policy = holding(make_policy("gdsf"), "back")
    assert policy.victim() == "back"
    policy.removed("back")  # the clock is 1
    policy.added("popular", 1, Use(1.0))
    for _ in range(2):
        policy.used("popular", Use(2.0))  # 1 + 3
    policy.added("back", 1, Use(3.0))  # 1 + 2
    policy.removed("back")
    policy.added("new", 1, Use(4.0))  # 1 + 1
    assert drained(policy) == ["new", "popular"]


def test_pgdsf_takes_the_mean_cost_over_uses_that_missed() -> None:
    """Equation 3. Chunk x missed twice, at 1 and 3: 2 each; y once, at 2.5, found once at no cost."""
    policy = PGDSF()
    policy.added("x", 1, Use(0.0, cost=1.0))
    policy.used("x", Use(1.0, cost=3.0))
    policy.added("y", 1, Use(2.0, cost=2.5))
    policy.used("y", Use(3.0))
    assert drained(policy) == ["x", "y"]  # 2 * 2 < 2 * 2.5


def test_chunk_of_unknown_cost_leaves_between_cheap_and_dear() -> None:
    policy = PGDSF()
    for key, cost in (("cheap", 1.0), ("dear", 3.0), ("unknown", None)):
        policy.added(key, 1, Use(0.0, cost=cost))
    assert drained(policy) == ["cheap", "unknown", "dear"]


def test_memory_of_what_left_has_an_end() -> None:
    counts = Counts(times=4)
    for number in range(20_000):
        counts.of(str(number)).uses += 1
        counts.left(str(number))
    assert len(counts._left) == 1024
    counts.of("19999").uses += 1
    assert (counts.of("19999").uses, counts.of("0").uses) == (2, 0)
