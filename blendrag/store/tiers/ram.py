"""The RAM tier: whole records in memory."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from blendrag.store.record import Layout, Record
from blendrag.store.stack import TierSpec
from blendrag.store.tiers.interface import Context, Opened, Read, Tier, register_tier
from blendrag.store.tiers.local import LocalTier


@register_tier("ram")
class RamTier(LocalTier):
    """A tier of whole records in memory, as they came, verified already. Their rows are handed out without a
    copy. Of a record with several shards, it keeps those that this process reads."""

    def __init__(self, spec: TierSpec, layout: Layout, on_evict: Callable[[str], None] | None = None) -> None:
        super().__init__(spec, layout, on_evict)
        self._records: dict[str, Record] = {}
        self._sizes = {}  # books cost nothing here, limits or not
        # Threads that write have the first one, on which each rank of several would take memory for nothing.
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    @classmethod
    def make(cls, spec: TierSpec, layout: Layout, context: Context) -> Tier:
        return cls(spec, layout, context.on_evict)

    def admits(self, nbytes: int) -> bool:
        """Return whether a record of so many bytes could be kept at all."""
        return self.spec.chunks != 0 and (self.spec.bytes is None or nbytes <= self.spec.bytes)

    def _open(self, keys: Sequence[str]) -> Mapping[str, Opened | Exception]:
        found = {key: record for key in keys if (record := self._records.get(key)) is not None}
        return {key: Opened(self, record.head, record) for key, record in found.items()}

    def _rows(self, one: Read) -> torch.Tensor:
        record = one.opened.source
        assert isinstance(record, Record)
        return record.rows[one.first - record.first : one.last - record.first]

    def clear(self) -> None:
        """Drop all records."""
        self.delete(list(self._records))

    def has(self, keys: Iterable[str]) -> set[str]:
        return {key for key in keys if key in self._records}

    def _found(self) -> Iterable[tuple[str, int]]:
        return ()

    def _size(self, record: Record) -> int:
        return record.head.own_bytes

    def _write(self, record: Record) -> None:
        own = record.own
        rows = own.rows if self._device is None else pinned(own.rows, self._device)
        self._records[record.key] = own if rows is own.rows else replace(own, rows=rows)

    def _remove(self, key: str) -> bool:
        return self._records.pop(key, None) is not None


def pinned(rows: torch.Tensor, device: int) -> torch.Tensor:
    """Return the rows in pages that stay where they are, which a GPU copies five times faster, and without a
    thread of the host; the rows themselves where the system refuses.

    PyTorch's own pinned memory would round each record up to a power of two.
    """
    memory = mmap.mmap(-1, rows.nbytes)
    held = torch.frombuffer(memory, dtype=torch.uint8).view(rows.shape).copy_(rows)
    runtime: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        if int(runtime.cudaHostRegister(held.data_ptr(), held.nbytes, 0)):
            with suppress(RuntimeError):  # the refusal would be raised by this thread's next launch
                torch.zeros(1, device=f"cuda:{device}")
            return rows
    weakref.finalize(held, _unpin, runtime, held.data_ptr(), memory)
    return held


def _unpin(runtime: Any, address: int, memory: mmap.mmap) -> None:
    """Give the pages back, before ``memory`` goes."""
    runtime.cudaHostUnregister(address)
