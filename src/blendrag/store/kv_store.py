"""The KV store as the engine's worker sees it: a RAM tier over a disk tier, under one catalogue."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

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
        self._lock = threading.Lock()
        self._damaged = 0

    @classmethod
    def open(cls, root: Path, identity: KVIdentity, *, ram_bytes: int, disk_bytes: int | None) -> KVStore:
        """Open or create the store in ``root``. Raises StoreMismatchError for another model's store.

        Sweeps what a crash may have left: files without a row, and rows whose file is gone.
        """
        catalogue = Catalogue.open(root, identity)
        disk = DiskTier(root / "kv", disk_bytes, codec=identity.codec, recent=catalogue.recent())
        for key in disk.keys() - catalogue.known():
            disk.delete(key)
        there = disk.keys()
        catalogue.mark([key for key in catalogue.recent() if key not in there], "pending")
        for entry in catalogue.pending():
            if entry.key in there:  # written, and the crash came before the row
                catalogue.mark_ready(entry.key, disk.path(entry.key).stat().st_size)
        return cls(catalogue, RamTier(ram_bytes), disk)

    def put(self, chunk: Chunk) -> int:
        """Store a chunk; the bytes written, 0 if the catalogue does not want it (any more).

        Raises StoreFullError, leaving nothing behind.
        """
        if not self._catalogue.knows(chunk.key):
            return 0
        evicted = self._disk.put(chunk)
        for key in evicted:
            self._ram.delete(key)
        if evicted:
            self._catalogue.mark(evicted, "evicted")
        if not self._catalogue.mark_ready(chunk.key, chunk.nbytes):  # deleted while it was being written
            self._disk.delete(chunk.key)
            return 0
        self._keep(chunk)
        return chunk.nbytes

    def get(self, key: str, token_ids: Sequence[int]) -> Chunk | Miss:
        """The chunk whose tokens begin with ``token_ids``. Ids are compared, not only the key.

        A damaged record is dropped and wanted again (pending).
        """
        chunk = self._ram.get(key)
        if chunk is None:
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
            self._ram.delete(key)
            dropped += self._disk.delete(key)
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
                if self._disk.get(key) is None:
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

    def _drop(self, key: str, reason: str) -> Miss:
        if reason == "damaged":
            self._damaged += 1
            self._disk.delete(key)
        if self._catalogue.ready([key]):
            self._catalogue.mark([key], "pending")
        return Miss("damaged" if reason == "damaged" else "missing")

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
