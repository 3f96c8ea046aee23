from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import pytest

import blendrag
from blendrag.errors import ConfigError
from blendrag.eviction import POLICIES, EvictionPolicy, Use, make_policy, register_policy
from blendrag.store.stack import Kind
from blendrag.store.tiers import TIERS, Opened, RamTier, TierSpec
from stores import LAYOUT, RECORD, make_chunk, make_record

A, B, C = (make_record(make_chunk(seed)) for seed in range(3))
SOURCES = sorted(Path(blendrag.__file__).parent.rglob("*.py"))


def test_unknown_policy_is_a_config_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'fifo'.*lru"):
        make_policy("fifo")


def test_every_kind_that_settings_know_is_registered() -> None:
    assert set(get_args(Kind)) == set(TIERS)


def test_ones_own_eviction_policy_is_obeyed() -> None:
    @register_policy("newest")
    class Newest(EvictionPolicy):
        """Last in, first out."""

        def __init__(self) -> None:
            self.keys: list[str] = []

        def added(self, key: str, size: int, use: Use) -> None:
            self.keys.append(key)

        def used(self, key: str, use: Use) -> None:
            pass

        def removed(self, key: str) -> None:
            self.keys.remove(key)

        def victim(self) -> str | None:
            return self.keys[-1] if self.keys else None

    evicted: list[str] = []
    try:
        spec = TierSpec(kind="ram", bytes=2 * RECORD, policy="newest")
        tier = RamTier(spec, LAYOUT, evicted.append)
        for record in (A, B, C):
            tier.put(record)
        assert evicted == [B.key]
    finally:
        del POLICIES["newest"]


@pytest.mark.parametrize("limit", [2 * RECORD, None])
def test_replaced_chunk_is_not_counted_twice(limit: int | None) -> None:
    tier = RamTier(TierSpec(kind="ram", bytes=limit), LAYOUT)
    for record in (A, A, B):
        tier.put(record)
    assert (tier.stats()["chunks"], tier.stats()["bytes"]) == (2, 2 * RECORD)
    assert tier.delete([A.key, A.key, "never put"]) == 1
    assert (tier.stats()["chunks"], tier.stats()["bytes"]) == (1, RECORD)


def test_full_tier_gives_up_the_least_recently_used() -> None:
    evicted: list[str] = []
    tier = RamTier(TierSpec(kind="ram", bytes=2 * RECORD, policy="lru"), LAYOUT, evicted.append)
    for record in (A, B, C):
        tier.put(record)
    assert evicted == [A.key]
    assert tier.has([A.key, B.key, C.key]) == {B.key, C.key}
    found = tier.open([A.key, B.key])
    assert set(found) == {B.key}
    opened = found[B.key]
    assert isinstance(opened, Opened) and opened.source is B
    stats = tier.stats()
    assert (stats["hits"], stats["misses"], stats["evictions"], stats["puts"]) == (1, 1, 1, 3)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_nothing_is_ever_unpickled(path: Path) -> None:
    """A store may come from anyone; pickle would run what they put into it."""
    forbidden = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not forbidden & {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in forbidden
            if node.module == "torch":
                assert not {"load", "save"} & {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in {("torch", "load"), ("torch", "save")}


def test_search_for_pickle_sees_the_sources() -> None:
    assert len(SOURCES) > 40
