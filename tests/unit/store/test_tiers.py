from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

import blendrag
from blendrag.errors import ConfigError
from blendrag.eviction import POLICIES, EvictionPolicy, Use, make_policy, register_policy
from blendrag.store.record import Head, Record
from blendrag.store.stack import Kind
from blendrag.store.tiers import TIERS, Opened, RamTier, TierSpec
from stores import LAYOUT, RECORD, make_chunk, make_record

A, B, C = (make_record(make_chunk(seed)) for seed in range(3))


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


def test_nothing_is_ever_unpickled() -> None:
    """A store may come from anyone; pickle would run what they put into it."""
    modules = "pickle|cPickle|_pickle|dill|cloudpickle|joblib|shelve|marshal"
    forbidden = re.compile(rf"({modules})(\..*)?|torch\.(load|save)")

    def named(path: Path) -> Iterator[str]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (one.name for one in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (f"{node.module}.{one.name}" for one in node.names)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                yield f"{node.value.id}.{node.attr}"

    sources = list(Path(blendrag.__file__).parent.rglob("*.py"))
    assert len(sources) > 40
    assert [path for path in sources if any(map(forbidden.fullmatch, named(path)))] == []


# -- pinned memory, without a GPU -----------------------------------------------------------------------


class Runtime:
    """As far as CUDA's is used, by a process that has the second device. refuses: every request."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses, self.kept, self.asked_on = refuses, dict[int, int](), list[int]()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.refuses:
            self.kept[address] = nbytes
        return 2 * self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        del self.kept[address]
        return 0


def tier(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> RamTier:
    gpu = SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: 1,
        cudart=lambda: runtime,
        device=lambda at: nullcontext(runtime.asked_on.append(at)),
    )
    monkeypatch.setattr(torch, "cuda", gpu)
    return RamTier(TierSpec(kind="ram", bytes=1 << 20), LAYOUT)


def read(ram: RamTier, head: Head) -> torch.Tensor:
    record = ram.open([head.key])[head.key].source  # type: ignore[union-attr]
    assert isinstance(record, Record)
    return record.rows


def test_pages_of_a_record_are_kept_until_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, record = Runtime(), make_record(make_chunk(1))
    ram = tier(monkeypatch, runtime)
    ram.put(record)
    rows = read(ram, record.head)
    assert rows.equal(record.rows) and runtime.kept == {rows.data_ptr(): rows.nbytes}
    assert runtime.asked_on == [1]
    ram.delete([record.key])
    gc.collect()
    assert runtime.kept, "a copy from it may be under way"
    del rows
    gc.collect()
    assert not runtime.kept


def test_record_stays_readable_where_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    ram, record = tier(monkeypatch, Runtime(refuses=True)), make_record(make_chunk(1))
    monkeypatch.setattr(torch, "zeros", _raises)
    ram.put(record)
    assert read(ram, record.head).equal(record.rows)


def _raises(*_: object, **__: object) -> None:
    raise RuntimeError("CUDA error: out of memory")
