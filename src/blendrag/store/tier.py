"""The storage tier axis: one interface for RAM, disk and what may follow."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
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

    ``on_evict`` hears of a chunk before it leaves for another one; if it raises, the chunk stays.
    Subclasses implement the four abstract methods; nobody else calls them.
    """

    name: str

    def __init__(
        self, limit: int | None, policy: str = "lru", on_evict: Callable[[str], None] | None = None
    ) -> None:
        self.limit = limit
        self._on_evict = on_evict
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

    def peek(self, key: str) -> Chunk | None:
        """Like :meth:`get`, but it counts neither as a use nor in the statistics."""
        return self._read(key)

    def used(self, key: str) -> None:
        """Note a use that a faster tier answered."""
        with self._lock:
            if key in self._sizes:
                self._policy.used(key)

    def put(self, chunk: Chunk) -> list[str]:
        """Keep a chunk; the keys that had to leave for it. Raises StoreFullError without room for it.

        If the write fails, a former record of the chunk is still there.
        """
        size = self._size(chunk)
        if self.limit is not None and size > self.limit:
            raise StoreFullError(
                f"a chunk of {size:,} bytes is more than the {self.name} tier's limit of {self.limit:,}"
            )
        with self._writing:
            with self._lock:
                former = self._sizes.get(chunk.key)
                self._forget(chunk.key)
            try:
                evicted = self._make_room(size)
                self._write(chunk)
            except BaseException:
                if former is not None:
                    with self._lock:
                        self._note(chunk.key, former)
                raise
            with self._lock:
                self._note(chunk.key, size)
            return evicted

    def trim(self) -> None:
        """Evict until the limit is obeyed: it may be lower than when the chunks were stored."""
        with self._writing:
            self._make_room(0)

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
    def _size(self, chunk: Chunk) -> int:
        """Bytes the chunk will take at most."""

    @abstractmethod
    def _read(self, key: str) -> Chunk | None:
        """The chunk, or None. Raises DamagedError."""

    @abstractmethod
    def _write(self, chunk: Chunk) -> None:
        """Keep the chunk, wholly or not at all. Raises StoreFullError, StoreError."""

    @abstractmethod
    def _remove(self, key: str) -> None:
        """Drop the chunk if it is there."""

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
        while (victim := self._victim(size)) is not None:
            if self._on_evict:
                self._on_evict(victim)  # before the record goes: a crash in between costs a file, not a row
            with self._lock:
                self._forget(victim)
                self._remove(victim)
                self._stats.evictions += 1
            evicted.append(victim)
        return evicted

    def _victim(self, size: int) -> str | None:
        with self._lock:
            if self.limit is None or self._stats.bytes + size <= self.limit:
                return None
            return self._policy.victim()
