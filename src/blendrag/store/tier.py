"""The storage tier axis: one interface for RAM, disk and what may follow."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass

from blendrag.errors import StoreFullError
from blendrag.eviction import make_policy
from blendrag.store.chunk import Chunk


class DamagedError(Exception):
    """A record exists and cannot be trusted. Never leaves the store: it becomes ``Miss("damaged")``."""


@dataclass(slots=True)
class TierStats:
    """Counters since the tier was opened, and what it holds now."""

    chunks: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0


class Tier(ABC):
    """Keeps chunks up to ``limit`` bytes (None: no limit); the policy says which one leaves. Thread-safe.

    Subclasses implement the four underscored methods and are never called by anyone else.
    """

    name: str

    def __init__(self, limit: int | None, policy: str = "lru") -> None:
        self.limit = limit
        self._policy = make_policy(policy)
        self._sizes: dict[str, int] = {}
        self._stats = TierStats()
        self._lock = threading.RLock()  # bookkeeping: held for moments
        self._writing = threading.Lock()  # one write at a time: reads go on meanwhile

    def get(self, key: str) -> Chunk | None:
        """The chunk, or None. Raises DamagedError if its record cannot be trusted."""
        with self._lock:
            if key not in self._sizes:
                self._stats.misses += 1
                return None
            self._policy.used(key)
        chunk = self._read(key)
        with self._lock:
            if chunk is None:
                self._stats.misses += 1
            else:
                self._stats.hits += 1
        return chunk

    def put(self, chunk: Chunk) -> list[str]:
        """Keep a chunk; the keys that had to leave for it. Raises StoreFullError without room for it."""
        size = self._size(chunk)
        if self.limit is not None and size > self.limit:
            raise StoreFullError(
                f"a chunk of {size:,} bytes is more than the {self.name} tier's limit of {self.limit:,}"
            )
        with self._writing:
            with self._lock:
                self._forget(chunk.key)
                evicted = self._make_room(size)
            self._write(chunk)
            with self._lock:
                self._note(chunk.key, size)
            return evicted

    def delete(self, key: str) -> bool:
        """Drop a chunk; whether it was there."""
        with self._writing, self._lock:
            known = key in self._sizes
            self._forget(key)
            self._remove(key)
            return known

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    def keys(self) -> set[str]:
        with self._lock:
            return set(self._sizes)

    def stats(self) -> dict[str, int]:
        with self._lock:
            return asdict(self._stats)

    # -- for subclasses -----------------------------------------------------------------------------------

    @abstractmethod
    def _size(self, chunk: Chunk) -> int: ...

    @abstractmethod
    def _read(self, key: str) -> Chunk | None: ...

    @abstractmethod
    def _write(self, chunk: Chunk) -> None: ...

    @abstractmethod
    def _remove(self, key: str) -> None: ...

    def _note(self, key: str, size: int) -> None:
        self._sizes[key] = size
        self._policy.added(key, size)
        self._stats.chunks += 1
        self._stats.bytes += size

    def _forget(self, key: str) -> None:
        size = self._sizes.pop(key, None)
        if size is not None:
            self._policy.removed(key)
            self._stats.chunks -= 1
            self._stats.bytes -= size

    def _make_room(self, size: int) -> list[str]:
        evicted: list[str] = []
        while self.limit is not None and self._stats.bytes + size > self.limit:
            victim = self._policy.victim()
            assert victim is not None, "an empty tier has room for what its limit allows"
            self._forget(victim)
            self._remove(victim)
            self._stats.evictions += 1
            evicted.append(victim)
        return evicted
