"""The KV store as the engine's worker sees it: a RAM tier over a disk tier, under one catalogue."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from blendrag.errors import StoreError
from blendrag.store.catalogue import Catalogue
from blendrag.store.chunk import Chunk, Miss
from blendrag.store.disk import DiskTier
from blendrag.store.identity import KVIdentity
from blendrag.store.ram import RamTier
from blendrag.store.tier import DamagedError

_TOUCH_INTERVAL_S = 5.0


class KVStore:
    """Open with :meth:`open`. Thread-safe. What is written is on disk before it counts as there."""

    def __init__(self, catalogue: Catalogue, ram: RamTier, disk: DiskTier) -> None:
        self._catalogue, self._ram, self._disk = catalogue, ram, disk
        self._uses: dict[str, int] = {}
        self._touched = time.monotonic()
        self._lock = threading.Lock()  # uses that are not written yet
        self._state = threading.Lock()  # whether a record is there and what the catalogue says of it
        self._damaged = 0

    @classmethod
    def open(cls, root: Path, identity: KVIdentity, *, ram_bytes: int, disk_bytes: int | None) -> KVStore:
        """Open or create the store in ``root``. Raises StoreMismatchError for another model's store.

        Sweeps what a crash may have left: files without a row, and rows whose file is gone.
        """
        catalogue, ram = Catalogue.open(root, identity), RamTier(ram_bytes)

        def evicted(key: str) -> None:
            catalogue.mark([key], "evicted")
            ram.delete(key)

        try:
            disk = DiskTier(
                root / "kv",
                disk_bytes,
                codec=identity.codec,
                recent=catalogue.recent(),
                on_evict=evicted,
            )
            _sweep(catalogue, disk)
        except BaseException:
            catalogue.close()
            raise
        return cls(catalogue, ram, disk)

    def put(self, chunk: Chunk) -> int:
        """Store a chunk; the bytes of its KV, 0 if the catalogue does not want it (any more).

        Raises StoreFullError, leaving nothing behind.
        """
        if not self._catalogue.knows(chunk.key):
            return 0
        self._disk.put(chunk)
        with self._state:
            try:
                noted = chunk.key in self._disk and self._catalogue.mark_ready(chunk.key, chunk.nbytes)
            except StoreError:
                self._disk.delete(chunk.key)
                raise
            if not noted:  # deleted while it was being written
                self._disk.delete(chunk.key)
                return 0
        self._keep(chunk)
        self._touch(chunk.key)
        return chunk.nbytes

    def get(self, key: str, token_ids: Sequence[int]) -> Chunk | Miss:
        """The chunk whose tokens begin with ``token_ids``. Ids are compared, not only the key.

        A damaged record is dropped and wanted again (pending). The tensor is the RAM tier's own: read only.
        """
        chunk = self._ram.get(key)
        if chunk is not None:
            self._disk.used(key)  # else what is read most would be the first to leave the disk
        else:
            try:
                chunk = self._disk.get(key)
            except DamagedError:
                return self._drop(key, "damaged")
            if chunk is None:
                return self._drop(key, "missing")
            self._keep(chunk)
        if chunk.token_ids[: len(token_ids)] != tuple(token_ids):
            return Miss("mismatch")
        self._touch(key)
        return chunk

    def prefetch(self, keys: Iterable[str]) -> None:
        """Bring chunks into the RAM tier; what cannot be had is left out."""
        for key in keys:
            if key not in self._ram:
                with contextlib.suppress(DamagedError):
                    chunk = self._disk.get(key)
                    if chunk is not None:
                        self._keep(chunk)

    def delete(self, keys: Iterable[str]) -> int:
        """Drop chunks from all tiers; how many there were."""
        dropped = 0
        for key in keys:
            dropped += self._disk.delete(key)
            self._ram.delete(key)  # after the disk: see _keep
        return dropped

    def stats(self) -> dict[str, Any]:
        """Counters per tier, and records found damaged."""
        return {"ram": self._ram.stats(), "disk": self._disk.stats(), "damaged": self._damaged}

    def check_integrity(self) -> list[str]:
        """Read every record and compare with the catalogue; a line per problem."""
        problems = []
        recorded = set(self._catalogue.recent())
        for key in sorted(self._disk.keys() | recorded):
            try:
                if self._disk.peek(key) is None:
                    problems.append(f"{key}: no file")
            except DamagedError as error:
                problems.append(str(error))
            if key not in recorded:
                problems.append(f"{key}: no row")
        return problems

    def close(self) -> None:
        with contextlib.suppress(StoreError):
            self._flush_uses()
        self._catalogue.close()

    def _keep(self, chunk: Chunk) -> None:
        if self._ram.fits(chunk):
            self._ram.put(chunk)
            if chunk.key not in self._disk:  # deleted meanwhile
                self._ram.delete(chunk.key)

    def _drop(self, key: str, reason: Literal["damaged", "missing"]) -> Miss:
        with self._state:
            if reason == "damaged":
                self._damaged += 1
                self._disk.delete(key)
            if key not in self._disk and self._catalogue.ready([key]):
                self._catalogue.mark([key], "pending")
        return Miss(reason)

    def _touch(self, key: str) -> None:
        """Uses are written in batches: a transaction per read would cost more than the read."""
        with self._lock:
            self._uses[key] = time.time_ns()
            due = time.monotonic() - self._touched > _TOUCH_INTERVAL_S
        if due:
            with contextlib.suppress(StoreError):  # bookkeeping is not worth a request
                self._flush_uses()

    def _flush_uses(self) -> None:
        with self._lock:
            uses, self._uses, self._touched = self._uses, {}, time.monotonic()
        self._catalogue.touch(uses)


def _sweep(catalogue: Catalogue, disk: DiskTier) -> None:
    for key in disk.keys() - catalogue.known():
        disk.delete(key)
    there, ready = disk.keys(), set(catalogue.recent())
    catalogue.mark(ready - there, "pending")
    for key in there - ready:  # written, and the crash came before the row
        try:
            chunk = disk.peek(key)
        except DamagedError:
            disk.delete(key)
        else:
            if chunk is not None:
                catalogue.mark_ready(key, chunk.nbytes)
    disk.trim()
