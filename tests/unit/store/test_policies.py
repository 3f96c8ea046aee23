"""What a store's eviction policies hear of prompts and forecasts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from blendrag.eviction import POLICIES, Use, register_policy
from blendrag.eviction.lru import LRU
from blendrag.store.kv_store import KVStore
from blendrag.store.tiers import RamTier, TierSpec
from stores import A, B, C, D, ask, filled_stack, get, holds, make_chunk, open_stack, put, register, states

E, F = make_chunk(4), make_chunk(5)
NAMES = {chunk.key: name for name, chunk in zip("ABCDEF", (A, B, C, D, E, F), strict=True)}


class Recording(LRU):
    """LRU that remembers what it was told; one of them per tier, in the order in which they were made."""

    made: list[Recording]

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[str, str, int, int, int]] = []
        self.made.append(self)

    def added(self, key: str, size: int, use: Use) -> None:
        self._hear("added", key, use)
        super().added(key, size, use)

    def used(self, key: str, use: Use) -> None:
        self._hear("used", key, use)
        super().used(key, use)

    def _hear(self, what: str, key: str, use: Use) -> None:
        assert use.at > 0.0
        self.heard.append((what, NAMES[key], use.depth, use.length, use.known))

    def take(self) -> list[tuple[str, str, int, int, int]]:
        heard, self.heard = self.heard, []
        return heard


@pytest.fixture
def recorded() -> Iterator[list[Recording]]:
    register_policy("recording")(Recording)
    Recording.made = []
    yield Recording.made
    del POLICIES["recording"]


def opened(root: Path, policy: str, *, ram: int = 10, disk: int = 10) -> KVStore:
    """RAM over disk, with limits in chunks. Nothing is written to RAM but what prompts used."""
    register(root, [A, B, C, D, E, F])
    return open_stack(
        root,
        TierSpec(kind="ram", chunks=ram, policy=policy, write="behind"),
        TierSpec(kind="disk", chunks=disk, policy=policy),
    )


def test_prompt_reaches_policies_with_its_structure(tmp_path: Path, recorded: list[Recording]) -> None:
    store = opened(tmp_path, "recording")
    ram, disk = recorded
    put(store, A, B, C)
    store.wait()
    store.empty_ram()
    ram.take(), disk.take()
    ask(store, A, B, A, D, C)  # D is nowhere
    from_the_end = [("used", "C", 3, 4, 0), ("used", "B", 1, 4, 0), ("used", "A", 0, 4, 0)]
    assert disk.take() == from_the_end
    assert sorted(ram.take()) == sorted(("added", *rest) for _, *rest in from_the_end)
    ask(store, A, B, E, C)
    from_the_end = [("used", "C", 3, 4, 2), ("used", "B", 1, 4, 2), ("used", "A", 0, 4, 2)]
    assert ram.take() == disk.take() == from_the_end


def test_reading_ahead_is_no_use(tmp_path: Path, recorded: list[Recording]) -> None:
    store = opened(tmp_path, "recording")
    ram, disk = recorded
    put(store, A)
    store.wait()
    store.empty_ram()
    ram.take(), disk.take()
    store.prefetch(A.key)
    get(store, A)
    store.close_records(store.open_records([(A.key, A.token_ids)]))
    assert disk.take() == [] and ram.take() == [("added", "A", 0, 1, 0)]
    ask(store, A)
    assert ram.take() == disk.take() == [("used", "A", 0, 1, 0)]


def test_use_of_yesterday_is_not_taken_for_one_that_brought_a_chunk(
    tmp_path: Path, recorded: list[Recording]
) -> None:
    store = opened(tmp_path, "recording")
    ram, _ = recorded
    put(store, A, B)
    store.wait()
    ask(store, B, A)
    ram.take()
    put(store, A)  # again, for whatever reason: its use has been told
    store.wait()
    assert ram.take() == [("added", "A", 0, 1, 0)]


def test_end_of_a_prompt_leaves_before_its_beginning(tmp_path: Path) -> None:
    store = opened(tmp_path, "lru", ram=0, disk=3)
    put(store, C, B, A)
    ask(store, A, B, C)
    put(store, D)
    assert {key for key, state in states(tmp_path).items() if state == "evicted"} == {C.key}


@pytest.mark.parametrize(("policy", "leaves"), [("lpc", B), ("lru", A)])
def test_forecast_changes_who_leaves(tmp_path: Path, policy: str, leaves: object) -> None:
    """From RAM and from the disk; it changes nothing for a policy that does not ask for it."""
    store = opened(tmp_path, policy, ram=3, disk=3)
    for chunk in (A, B, C):
        put(store, chunk)
        ask(store, chunk)
    store.wait()
    store.policies.forecast([("goes on", 0.9, [A.key, C.key, "gone"]), ("is over", 0.01, [B.key, A.key])])
    put(store, D)
    store.wait()
    left = [chunk is not leaves for chunk in (A, B, C)]
    assert holds(store, A, B, C, D) == [[*left, True]] * 2


def test_tier_without_limits_pays_nothing_for_policies(tmp_path: Path, recorded: list[Recording]) -> None:
    store = filled_stack(tmp_path, [A], TierSpec(kind="disk", policy="recording"))
    ask(store, A)
    store.policies.forecast([("goes on", 0.9, [A.key])])
    assert recorded[0].heard == []


def test_what_policies_take_is_measured(tmp_path: Path) -> None:
    store = opened(tmp_path, "lpc")
    put(store, A)
    for _ in range(3):
        ask(store, A)
    store.policies.forecast([("goes on", 0.9, [A.key])])
    get(store, A)
    stats = store.policies.stats()
    assert (stats["used"]["calls"], stats["forecast"]["calls"]) == (3, 1)
    for one in stats.values():
        assert 0.0 < one["worst_ms"] <= 1e3 * one["seconds"]
    once = stats["forecast"]
    assert once["worst_ms"] == pytest.approx(1e3 * once["seconds"])


def test_waiting_for_a_chunk_takes_limited_memory() -> None:
    tier = RamTier(TierSpec(kind="ram", chunks=1), None)  # type: ignore[arg-type]
    for number in range(5000):
        tier.used([(str(number), Use(1.0))])
    assert len(tier._expected) <= 1024
