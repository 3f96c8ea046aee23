"""Limits and eviction for the tiers of this machine."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from blendrag.errors import StoreFullError
from blendrag.eviction import EvictionPolicy, Use, make_policy
from blendrag.store.record import Layout, Record
from blendrag.store.stack import TierSpec
from blendrag.store.tiers.interface import Read, Tier

Forecast = tuple[str, float, Sequence[str]]
"""A conversation, the chance that it goes on, and the keys of chunks that it used."""

_EXPECTED = 1024


class LocalTier(Tier):
    """A tier that knows what it holds. One write at a time; reads go on meanwhile.

    ``on_evict`` hears of a record before it leaves for another one; if it raises, the record stays.
    What is there already is asked for (:meth:`_found`) when the books are first needed: with a million
    records that takes a second, which a tier without limits never spends.
    """

    def __init__(self, spec: TierSpec, layout: Layout, on_evict: Callable[[str], None] | None = None) -> None:
        super().__init__(spec, layout)
        self._on_evict = on_evict
        self._policy: EvictionPolicy = make_policy(spec.policy)
        self._sizes: dict[str, int] | None = None
        self._expected: OrderedDict[str, Use] = OrderedDict()  # of chunks that may come from another tier
        self._writing = threading.Lock()
        self.parents: Mapping[str, str] = {}
        """The parents of records that form a tree: by key, the key of the record that it stands behind. Only
        leaves may leave, and a record comes in only if its parent is here (RAGCache, section 5.1)."""
        self._children: Counter[str] = Counter()  # how many children of a record are held
        self._counted: dict[str, str] = {}  # the parent that counts a record

    @property
    def counted(self) -> bool:
        return self._sizes is not None

    def put(self, record: Record) -> None:
        size = self._size(record)
        if (self.spec.bytes is not None and size > self.spec.bytes) or self.spec.chunks == 0:
            raise StoreFullError(f"a chunk of {size:,} bytes is more than the {self.name} tier may hold")
        with self._writing:
            parent, books = self.parents.get(record.key), self._books()
            if parent and books is not None and parent not in books:
                raise StoreFullError(f"the {self.name} tier lacks what a chunk stands behind")
            former = self._forget(record.key)
            try:
                self._make_room(size, parent=parent)
                self._write(record)
            except BaseException:
                if former is not None:  # a failed write leaves the former record of the chunk
                    self._note(record.key, former)
                raise
            self._note(record.key, size)
            self.count(puts=1)

    def trim(self) -> None:
        """Evict until the limits are obeyed: they may be lower than when the records were stored."""
        if self.spec.evicts:
            with self._writing:
                self._make_room(0, new=0)

    def noticed(self, key: str, size: int) -> None:
        """Note a record that was not known to be here: a crash came before it was noted."""
        if self._sizes is not None and key not in self._sizes:
            self._note(key, size)

    def missed(self, key: str) -> None:
        """Take a record out of the books that was removed by somebody else. Raises TierError."""
        with self._writing:
            if not self.has([key]):
                self._forget(key)

    def delete(self, keys: Iterable[str]) -> int:
        dropped = 0
        for key in keys:
            with self._writing:
                dropped += self._remove(key)
                self._forget(key)
        return dropped

    def used(self, uses: Sequence[tuple[str, Use]]) -> None:
        """Tell the policy that a prompt used these chunks, wherever it found them, in this order.

        A chunk that is not here and comes soon comes because of that use.
        """
        if self._sizes is None:
            return
        with self._lock:
            for key, use in uses:
                if key in self._sizes:
                    self._policy.used(key, use)
                else:
                    self._expected[key] = use
                    self._expected.move_to_end(key)
            while len(self._expected) > _EXPECTED:
                self._expected.popitem(last=False)

    def forecast(self, forecasts: Iterable[Forecast]) -> None:
        """Tell the policy which conversations go on. Chunks that are not here are passed over."""
        if self._sizes is None or not self._policy.uses_forecasts():
            return
        with self._lock:
            now = time.monotonic()
            for conversation, chance, keys in forecasts:
                for key in keys:
                    if key in self._sizes:
                        self._policy.forecast(key, chance, now, conversation)

    def read(self, wanted: Sequence[Read]) -> list[torch.Tensor]:
        return [self._rows(one) for one in wanted]

    # -- for subclasses -----------------------------------------------------------------------------------

    @abstractmethod
    def _rows(self, one: Read) -> torch.Tensor:
        """Do as :meth:`read`, for one."""

    @abstractmethod
    def _found(self) -> Iterable[tuple[str, int]]:
        """Return (key, size) of what was there when the tier was opened, least recently used first."""

    @abstractmethod
    def _write(self, record: Record) -> None:
        """Keep the record, wholly or not at all. Raises StoreFullError, StoreError."""

    def _check_removable(self, key: str) -> None:
        """Raise StoreError if the record cannot be removed now, before others are evicted in vain."""

    @abstractmethod
    def _remove(self, key: str) -> bool:
        """Drop the record. Returns whether it was there."""

    def _size(self, record: Record) -> int:
        """Return the bytes that the record takes here."""
        return record.head.nbytes

    # -- books --------------------------------------------------------------------------------------------

    def _books(self) -> dict[str, int] | None:
        """Return sizes by key; None while nobody needs them."""
        if self._sizes is None and self.spec.evicts:
            with self._lock:
                if self._sizes is None:
                    sizes: dict[str, int] = {}
                    use = _now()
                    for key, size in self._found():
                        sizes[key] = size
                        self._policy.added(key, size, use)
                        self._count_child(key, 1)
                    self._stats |= {"chunks": len(sizes), "bytes": sum(sizes.values())}
                    self._sizes = sizes
        return self._sizes

    def _note(self, key: str, size: int) -> None:
        books = self._books()
        with self._lock:
            self.count(chunks=1, bytes=size)
            if books is not None:
                books[key] = size
                self._count_child(key, 1)
                use = self._expected.pop(key, None)
                self._policy.added(key, size, replace(use, at=time.monotonic()) if use else _now())

    def _forget(self, key: str) -> int | None:
        books = self._books()
        if books is None:
            return None
        with self._lock:
            size = books.pop(key, None)
            if size is not None:
                self._policy.removed(key)
                self._count_child(key, -1)
                self.count(chunks=-1, bytes=-size)
            return size

    def _count_child(self, key: str, by: int) -> None:
        parent = self.parents.get(key) if by > 0 else self._counted.pop(key, None)
        if parent:
            if by > 0:
                self._counted[key] = parent
            self._children[parent] += by
            if not self._children[parent]:
                del self._children[parent]

    def _make_room(self, size: int, new: int = 1, parent: str | None = None) -> None:
        """Evict until a record of this size fits. parent: the one of the record that comes; it stays."""
        while self._over(size, new):
            victim = self._victim(parent)
            if victim is None:
                raise StoreFullError(f"the {self.name} tier has no room beside what a chunk stands behind")
            self._check_removable(victim)
            if self._on_evict:
                self._on_evict(victim)  # before the record goes: a crash in between costs a file, not a row
            self._remove(victim)
            self._forget(victim)
            self.count(evictions=1)

    def _over(self, size: int, new: int) -> bool:
        books = self._books()
        if books is None:
            return False
        with self._lock:
            over_bytes = self.spec.bytes is not None and self._stats["bytes"] + size > self.spec.bytes
            over_count = self.spec.chunks is not None and len(books) + new > self.spec.chunks
            return over_bytes or over_count

    def _victim(self, parent: str | None) -> str | None:
        with self._lock:
            if not self.parents:
                return self._policy.victim()
            return self._policy.victim(lambda key: key not in self._children and key != parent)


def _now() -> Use:
    """Return a use of which only the time is known."""
    return Use(at=time.monotonic())
