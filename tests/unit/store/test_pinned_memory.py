"""The RAM tier where a GPU is, without one: its runtime is asked to keep pages, and to let them go."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from blendrag.store.record import Head, Record
from blendrag.store.tiers import TierSpec
from blendrag.store.tiers.ram import RamTier
from stores import LAYOUT, make_chunk, make_record


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
