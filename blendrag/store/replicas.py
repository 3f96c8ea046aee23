"""Copies of records in the other tiers: slower tiers get what is stored, faster ones what is read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from blendrag.errors import StoreError
from blendrag.store.primary import Primary, delete_from
from blendrag.store.record import Head, Record
from blendrag.store.tiers import Opened, RamTier, Tier, TierError

_MAX_WAITING = 512 << 20  # bytes of records that wait to be written behind


class Replicas:
    """The copies of records. Thread-safe. Failures are counted by the tier; the primary tier has the record.
    A chunk that is deleted while a copy of it is under way is deleted there, too. primary: None where nothing
    is stored: then only RAM gets copies."""

    def __init__(self, tiers: Sequence[Tier], primary: Primary | None = None) -> None:
        self._tiers, self._primary = tiers, primary
        self._behind = Background("copies", _MAX_WAITING)  # to slower tiers: the writer waits for room
        self._promotions = Background("promotions", _MAX_WAITING)  # to faster tiers: dropped without room
        self._leaving: set[str] = set()  # deleted, while copies of them may still be under way

    def store(self, record: Record) -> bool:
        """Store the record in the primary tier, and copy it to the tiers that are written through or behind.
        Returns False if the catalogue does not want it (any more). Raises StoreError, leaving nothing
        behind."""
        assert self._primary is not None, "only the owner stores"
        self._leaving.discard(record.key)
        try:
            if not self._primary.put(record):
                return False
        except TierError as error:
            raise StoreError(f"the {self._primary.tier.name} tier cannot be written: {error}") from error
        for tier in self._tiers:
            if tier is not self._primary.tier and tier.spec.writes == "through":
                self._copy(tier, record)
            elif tier is not self._primary.tier and tier.spec.writes == "behind":
                self._behind.do(partial(self._copy, tier, record), record.nbytes)
        if not self._wanted(record.key):  # another thread may just have deleted it
            for tier in self._tiers:
                if isinstance(tier, RamTier):
                    tier.delete([record.key])
        return True

    def wants(self, opened: Opened) -> bool:
        """Return whether a faster tier than the record's would keep what is read of it."""
        return bool(self._faster(opened.tier, opened.head, len(opened.head.own_rows)))

    def want_whole(self, opened: Opened) -> bool:
        """Return whether a faster tier other than RAM would keep it, so that it is read whole."""
        faster = self._faster(opened.tier, opened.head, opened.head.num_rows)
        return any(not isinstance(tier, RamTier) for tier in faster)

    def promote(self, record: Record, found_in: Tier) -> None:
        """Give a verified record to the tiers that are faster than the one it was found in. A record of which
        only a part was read goes to RAM only."""
        for tier in self._faster(found_in, record.head, len(record.rows)):
            if self._copy(tier, record):
                tier.count(promotions=1)

    def promote_behind(self, records: Sequence[Record], found_in: Sequence[Tier]) -> None:
        """Do as :meth:`promote`, in the background, as far as there is room for it."""
        for record, tier in zip(records, found_in, strict=True):
            self._promotions.do_if_room(partial(self.promote, record, tier), record.nbytes)

    def after_promotions(self, work: Callable[[], object]) -> None:
        """Run something else in the background, if there is room."""
        self._promotions.do_if_room(work)

    @contextmanager
    def leaving(self, keys: Sequence[str]) -> Iterator[None]:
        """Keep these chunks out of all tiers while they are deleted, and until all copies under way are done,
        unless they are stored anew."""
        self._leaving.update(keys)
        try:
            yield
        finally:
            self._behind.do(partial(self._promotions.do, partial(self._leaving.difference_update, keys)))

    def wait(self) -> None:
        """Wait until what is under way is done."""
        self._behind.wait()
        self._promotions.wait()

    def close(self) -> None:
        self._behind.close()
        self._promotions.close()

    def _copy(self, tier: Tier, record: Record) -> bool:
        """Copy a record to a tier. Returns whether the tier has it now."""
        if not self._wanted(record.key):
            return False
        there = False
        with contextlib.suppress(StoreError, TierError):
            if self._primary is not None and tier is self._primary.tier:
                self._primary.put(record)
            else:
                tier.put(record)
            there = True
        if not self._wanted(record.key):  # deleted meanwhile
            delete_from(tier, [record.key])
        return there

    def _wanted(self, key: str) -> bool:
        return key not in self._leaving and (self._primary is None or self._primary.knows(key))

    def _faster(self, found_in: Tier, head: Head, rows: int) -> list[Tier]:
        """Return the faster tiers that would keep so many rows of a record."""
        return [
            tier
            for tier in self._tiers[: self._tiers.index(found_in)]
            if tier.spec.writes != "never"
            and (tier.admits(head.own_bytes) if isinstance(tier, RamTier) else rows == head.num_rows)
        ]


class Background:
    """A thread that runs work in order. Where ``most`` bytes wait, new work waits, or is dropped."""

    def __init__(self, name: str, most: int) -> None:
        self._most, self._waiting = most, 0
        self._room = threading.Condition()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"blendrag-{name}")

    def do(self, work: Callable[[], object], nbytes: int = 0) -> None:
        """Run ``work``, which keeps ``nbytes`` in memory, later. Waits for room for it first."""
        with self._room:
            self._room.wait_for(lambda: self._fits(nbytes))
            self._begin(work, nbytes)

    def do_if_room(self, work: Callable[[], object], nbytes: int = 0) -> bool:
        """Run ``work`` later. Returns False, and does nothing, if there is no room for it now."""
        with self._room:
            if not self._fits(nbytes):
                return False
            self._begin(work, nbytes)
            return True

    def wait(self) -> None:
        """Wait until everything given so far is done."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Do what was given, and end."""
        self._thread.shutdown()

    def _fits(self, nbytes: int) -> bool:
        return not self._waiting or self._waiting + nbytes <= self._most

    def _begin(self, work: Callable[[], object], nbytes: int) -> None:
        self._waiting += nbytes
        self._thread.submit(self._run, work, nbytes)

    def _run(self, work: Callable[[], object], nbytes: int) -> None:
        try:
            work()
        finally:
            with self._room:
                self._waiting -= nbytes
                self._room.notify_all()
