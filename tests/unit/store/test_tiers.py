from __future__ import annotations

import ast
from pathlib import Path

import pytest
from stores import make_chunk

import blendrag
from blendrag.errors import ConfigError
from blendrag.eviction import POLICIES, EvictionPolicy, make_policy, register_policy
from blendrag.store.codec import make_codec
from blendrag.store.ram import RamTier

A, B, C = (make_chunk(seed) for seed in range(3))
SOURCES = sorted(Path(blendrag.__file__).parent.rglob("*.py"))


def test_unknown_policy_and_codec_are_config_errors_that_name_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'fifo'.*lru"):
        make_policy("fifo")
    with pytest.raises(ConfigError, match=r"'zip'.*raw"):
        make_codec("zip")


def test_empty_policy_names_no_victim() -> None:
    policy = make_policy("lru")
    assert policy.victim() is None
    policy.used("never added")
    policy.removed("never added")
    assert policy.victim() is None


def test_ones_own_eviction_policy_is_obeyed() -> None:
    @register_policy("newest")
    class Newest(EvictionPolicy):
        """Last in, first out."""

        def __init__(self) -> None:
            self.keys: list[str] = []

        def added(self, key: str, size: int) -> None:
            self.keys.append(key)

        def used(self, key: str) -> None:
            pass

        def removed(self, key: str) -> None:
            self.keys.remove(key)

        def victim(self) -> str | None:
            return self.keys[-1] if self.keys else None

    try:
        tier = RamTier(2 * A.nbytes, policy="newest")
        assert [tier.put(chunk) for chunk in (A, B, C)] == [[], [], [B.key]]
    finally:
        del POLICIES["newest"]


def test_replaced_chunk_is_not_counted_twice() -> None:
    tier = RamTier(2 * A.nbytes)
    assert tier.put(A) == tier.put(A) == tier.put(B) == []
    assert tier.stats() == {"chunks": 2, "bytes": 2 * A.nbytes, "hits": 0, "misses": 0, "evictions": 0}
    assert tier.put(C) == [A.key]
    assert tier.get(A.key) is None and tier.get(B.key) is B
    assert (tier.stats()["hits"], tier.stats()["misses"]) == (1, 1)


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
