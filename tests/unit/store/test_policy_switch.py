"""Another policy on a tier that is running."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest

from blendrag.errors import ConfigError, PredictorError
from blendrag.eviction import POLICIES, Use
from blendrag.eviction.hazard import Hazard
from blendrag.store.tiers import RamTier, TierSpec
from blendrag.store.tiers.local import LocalTier
from stores import LAYOUT, RECORD, make_chunk, make_record, open_store

A, B, C, D = (make_record(make_chunk(seed)) for seed in range(4))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_new_policy_knows_nothing_of_what_is_held(name: str) -> None:
    evicted: list[str] = []
    tier = RamTier(TierSpec(kind="ram", bytes=3 * RECORD), LAYOUT, evicted.append)
    for record in (A, B, C):
        tier.put(record)
    tier.used([(A.key, Use(at=0.0))])
    tier.use_policy(name)
    tier.put(D)
    assert evicted == [B.key]
    tier.put(B)
    assert evicted == [B.key, C.key]
    assert (tier.stats()["chunks"], tier.stats()["bytes"]) == (3, 3 * RECORD)


def test_unknown_policy_takes_the_place_of_the_one_that_works() -> None:
    evicted: list[str] = []
    tier = RamTier(TierSpec(kind="ram", bytes=RECORD), LAYOUT, evicted.append)
    tier.put(A)
    with pytest.raises(ConfigError, match="fifo"):
        tier.use_policy("fifo")
    tier.put(B)
    assert evicted == [A.key]


def test_tier_that_was_empty_is_not_evicted_from_later() -> None:
    evicted: list[str] = []
    tier = RamTier(TierSpec(kind="ram", bytes=RECORD), LAYOUT, evicted.append)
    tier.use_policy("gdsf")
    for record in (A, B):
        tier.put(record)
    assert evicted == [A.key]


def test_tier_with_many_chunks_waits_until_all_are_carried_over() -> None:
    """The former order stands meanwhile, and a second switch does not wait for the first."""
    evicted: list[str] = []
    tier = RamTier(TierSpec(kind="ram", bytes=300 * RECORD), LAYOUT, evicted.append)
    records = [make_record(make_chunk(seed)) for seed in range(302)]
    for record in records[:300]:
        tier.put(record)
    tier.use_policy("lfu")
    tier.put(records[300])
    tier.use_policy("gdsf")
    tier.put(records[301])
    assert evicted == [records[0].key, records[1].key]
    deadline = time.monotonic() + 60
    while not isinstance(tier._policy, POLICIES["gdsf"]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert tier._policy.victim() == records[2].key
    left = []
    while (key := tier._policy.victim()) is not None:
        tier._policy.removed(key)
        left.append(key)
    assert left == [record.key for record in records[2:]]


def test_store_goes_by_what_a_prefix_cache_taught(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        with pytest.raises(PredictorError, match="prefixes"):
            store.learn(Mock(Hazard, prefix=True))
        for tier in store.tiers:
            assert isinstance(tier, LocalTier) and tier._hazard is None
