from __future__ import annotations

import pytest

from blendrag.control.guard import LoadGuard
from blendrag.store.tiers import RamTier, Tier, TierSpec
from stores import LAYOUT

PREFILL = 1000.0  # tokens per second
SLOW, FAST = 100.0, 10_000.0


@pytest.fixture
def guard() -> LoadGuard:
    made = LoadGuard()
    made.prefilled(1000, 1000 / PREFILL)
    return made


def tier(guard: LoadGuard, *rates: float) -> Tier:
    """One that was loaded from at these rates, one after the other."""
    made = RamTier(TierSpec(kind="ram"), LAYOUT)
    for rate in rates:
        guard.loaded(made, 1000, 1000 / rate)
    return made


def asked(guard: LoadGuard, one: Tier, times: int) -> list[bool]:
    """Whether each of so many prompts is refused."""
    return [guard.refuses({one: 1000}, 1000) is not None for _ in range(times)]


def test_slow_tier_is_refused_and_a_fast_one_is_not(guard: LoadGuard) -> None:
    slow, fast = tier(guard, SLOW, SLOW, SLOW), tier(guard, FAST, FAST, FAST)
    why = guard.refuses({slow: 4000}, 4000)
    assert why == "loading 4,000 tokens from ram would take 40 s, prefilling 4 s"
    assert guard.refuses({fast: 4000}, 4000) is None


def test_nothing_is_refused_before_it_was_measured() -> None:
    guard = LoadGuard()
    slow = tier(guard, SLOW, SLOW)
    assert not any(asked(guard, slow, 40))
    guard.prefilled(1000, 1000 / PREFILL)
    assert not any(asked(guard, slow, 40)), "two loads are too few"
    guard.loaded(slow, 1000, 1000 / SLOW)
    assert asked(guard, slow, 1) == [True]


def test_short_prompts_neither_tell_nor_are_told_anything(guard: LoadGuard) -> None:
    slow = tier(guard, SLOW, SLOW, SLOW)
    assert guard.refuses({slow: 200}, 200) is None
    assert guard.refuses({slow: 1000}, 200) is None, "most of it is in the prefix cache"
    for _ in range(3):
        guard.loaded(slow, 200, 1e-3)
        guard.prefilled(200, 1e3)
    assert asked(guard, slow, 1) == [True]


def test_tier_that_becomes_fast_is_found_out(guard: LoadGuard) -> None:
    slow = tier(guard, SLOW, SLOW, SLOW)
    refused = asked(guard, slow, 64)
    assert refused.count(False) == 4, "one in sixteen is loaded nevertheless"
    guard.loaded(slow, 1000, 1000 / FAST)  # by one of those
    assert not any(asked(guard, slow, 40))


def test_tier_that_becomes_slow_is_refused_after_three_loads(guard: LoadGuard) -> None:
    fast = tier(guard, FAST, FAST, FAST)
    for _ in range(3):
        assert asked(guard, fast, 1) == [False]
        guard.loaded(fast, 1000, 1000 / SLOW)
    assert asked(guard, fast, 1) == [True]


def test_one_slow_load_among_fast_ones_changes_nothing(guard: LoadGuard) -> None:
    assert not any(asked(guard, tier(guard, FAST, SLOW, SLOW), 40))


def test_what_several_tiers_take_is_added_up_as_far_as_it_is_known(guard: LoadGuard) -> None:
    one, other = (tier(guard, *[1.5 * PREFILL] * 3) for _ in range(2))
    unknown = tier(guard)
    assert guard.refuses({one: 1000, unknown: 1000}, 2000) is None
    assert guard.refuses({one: 1000, other: 1000}, 2000) is None
    assert guard.refuses({one: 1000, other: 1000}, 1000), "half of it is in the prefix cache"


def test_our_own_forward_counts_until_the_engine_has_prefilled() -> None:
    guard = LoadGuard()
    slow = tier(guard, SLOW, SLOW, SLOW)
    guard.computed(100, 100 / FAST)
    assert asked(guard, slow, 1) == [True]
    guard.prefilled(1000, 1000 / (SLOW / 2))
    guard.computed(100, 100 / FAST)
    assert asked(guard, slow, 1) == [False]


def test_tier_that_is_closed_is_forgotten(guard: LoadGuard) -> None:
    closed = tier(guard, SLOW)
    assert len(guard._tiers) == 1
    del closed
    assert not guard._tiers
