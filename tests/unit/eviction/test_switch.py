"""From one policy to another, chunk by chunk, while both are asked."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.eviction import POLICIES, EvictionPolicy, Use, make_policy
from blendrag.eviction.switch import PolicySwitch

BUILT_IN = sorted(POLICIES)
KEYS = [f"k{i}" for i in range(8)]
CALL = st.tuples(
    st.sampled_from(["added", "used", "removed", "forecast", "evict", "step"]), st.sampled_from(KEYS)
)
CALLS = st.lists(CALL, max_size=60)


class Tier:
    """What a tier does, with a clock that ticks at each call."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.sizes: dict[str, int] = {}
        self.now = 0.0

    def use(self) -> Use:
        self.now += 1.0
        return Use(self.now)

    def call(self, call: str, key: str) -> str | None:
        use = self.use()
        if call == "added":
            self.sizes[key] = 5
            self.policy.added(key, 5, use)
        elif call == "used" and key in self.sizes:
            self.policy.used(key, use)
        elif call == "removed":
            self.remove(key)
        elif call == "forecast":
            self.policy.forecast(key, 0.9, self.now, "talk")
        elif call == "evict" and (victim := self.policy.victim()) is not None:
            self.remove(victim)
            return victim
        elif call == "step" and isinstance(self.policy, PolicySwitch) and self.policy.step(2, use):
            self.policy = self.policy.successor
        return None

    def remove(self, key: str) -> None:
        self.sizes.pop(key, None)
        self.policy.removed(key)

    def switch(self, name: str) -> None:
        self.policy = PolicySwitch(self.policy, make_policy(name), self.sizes)

    def finish(self) -> None:
        while isinstance(self.policy, PolicySwitch):
            self.call("step", "")

    def drained(self) -> list[str]:
        """All chunks, in the order in which they leave."""
        left = []
        while (key := self.policy.victim()) is not None:
            self.remove(key)
            left.append(key)
        return left


@pytest.mark.parametrize("former", BUILT_IN)
@pytest.mark.parametrize("successor", BUILT_IN)
@given(before=CALLS)
def test_order_is_not_the_former_policys_when_the_new_one_begins(
    former: str, successor: str, before: list[tuple[str, str]]
) -> None:
    stays, changes = Tier(make_policy(former)), Tier(make_policy(former))
    for call in before:
        stays.call(*call)
        changes.call(*call)
    changes.switch(successor)
    changes.finish()
    assert isinstance(changes.policy, POLICIES[successor])
    assert changes.drained() == stays.drained()


@given(CALLS, CALLS)
def test_lru_loses_its_order_on_the_way_to_lru(
    before: list[tuple[str, str]], after: list[tuple[str, str]]
) -> None:
    """Whatever happens meanwhile: which chunk leaves, and which one would, at every moment."""
    tier, order = Tier(make_policy("lru")), OrderedDict[str, None]()
    for number, (call, key) in enumerate([*before, *after]):
        if number == len(before):
            tier.switch("lru")
        victim = tier.call(call, key)
        if call == "added" or (call == "used" and key in order):
            order[key] = None
            order.move_to_end(key)
        elif call == "removed" or victim is not None:
            order.pop(victim or key, None)
        assert tier.policy.victim() == next(iter(order), None)
    tier.finish()
    assert tier.drained() == list(order)


@pytest.mark.parametrize("former", BUILT_IN)
@pytest.mark.parametrize("successor", BUILT_IN)
@given(before=CALLS, after=CALLS)
def test_chunk_is_forgotten_or_named_twice_on_the_way(
    former: str, successor: str, before: list[tuple[str, str]], after: list[tuple[str, str]]
) -> None:
    tier = Tier(make_policy(former))
    for call in before:
        tier.call(*call)
    tier.switch(successor)
    for call in after:
        held = set(tier.sizes)
        victim = tier.call(*call)
        assert victim is None or victim in held
    tier.switch(former)  # once more, before it is finished
    held = set(tier.sizes)
    tier.finish()
    assert sorted(tier.drained()) == sorted(held)


def test_chunks_that_the_former_policy_does_not_name_are_never_evicted() -> None:
    class Forgetful(EvictionPolicy):
        def added(self, key: str, size: int, use: Use) -> None: ...
        def used(self, key: str, use: Use) -> None: ...
        def removed(self, key: str) -> None: ...
        def victim(self) -> None: ...

    tier = Tier(Forgetful())
    for key in KEYS:
        tier.call("added", key)
    tier.switch("lru")
    tier.finish()
    assert tier.drained() == KEYS


def test_switch_asks_for_more_than_its_share_at_once() -> None:
    tier = Tier(make_policy("lru"))
    for number in range(100):
        tier.call("added", f"k{number}")
    tier.switch("gdsf")
    assert isinstance(tier.policy, PolicySwitch)
    steps = 0
    while not tier.policy.step(7, tier.use()):
        steps += 1
        assert len(tier.policy._carried) == 7 * steps
    assert steps == 14
