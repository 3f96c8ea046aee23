"""The primary tier, where a chunk counts as stored, kept in step with the catalogue."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from blendrag.errors import StoreError
from blendrag.store.catalogue import Catalogue
from blendrag.store.record import Record
from blendrag.store.tiers import DiskTier, RamTier, Tier, TierError
from blendrag.store.tiers.local import LocalTier


class Primary:
    """The primary tier and the catalogue, in step even after a crash: the catalogue notes a file before it
    may be deleted, and a file that nobody waits for before it is written. So :meth:`recover` has to look at
    few files, however many there are.

    tiers: all of the stack, which may still be made. at: the place of the primary one.
    """

    def __init__(self, catalogue: Catalogue, tiers: Sequence[Tier], at: int) -> None:
        self._catalogue, self._tiers, self._at = catalogue, tiers, at
        self._evicted: list[str] = []
        self._state = threading.Lock()  # over a record and what the catalogue says of it

    @property
    def tier(self) -> Tier:
        return self._tiers[self._at]

    def knows(self, key: str) -> bool:
        """Return whether the catalogue wants the chunk."""
        return self._catalogue.knows(key)

    def holds(self, key: str) -> bool:
        """Return whether the chunk is stored."""
        return _has(self.tier, key) and bool(self._catalogue.ready([key]))

    def evicting(self, key: str) -> None:
        """Note that the tier is about to drop a record for another one."""
        below = any(_has(tier, key) for tier in self._tiers[self._at + 1 :])  # it can still be had
        with self._state:
            self._catalogue.evict([key], keep_ready=below)
            self._evicted.append(key)
        if not below:
            for tier in self._tiers[: self._at]:
                if isinstance(tier, RamTier):
                    tier.delete([key])

    def put(self, record: Record) -> bool:
        """Store a record; False if the catalogue does not want it (any more).

        Raises StoreFullError, StoreError, TierError, leaving nothing behind.
        """
        self._announce(record.key)
        try:
            self.tier.put(record)
        finally:
            with self._state:
                gone, self._evicted = self._evicted, []
            self.bury(gone)
        return self._note_ready(record)

    def _announce(self, key: str) -> None:
        """Have a chunk that nobody waits for deleted after a crash, until :meth:`_note_ready`."""
        if isinstance(self.tier, DiskTier):
            entries = self._catalogue.entries_of([key])
            if not entries or entries[0].state == "evicted":
                self._catalogue.evict([key])

    def _note_ready(self, record: Record) -> bool:
        key = record.key
        try:
            with self._state:
                noted = bool(self.tier.has([key])) and self._catalogue.mark_ready(key, record.head.nbytes)
        except (StoreError, TierError):
            if not self._catalogue.ready([key]):  # what was acknowledged before stays
                delete_from(self.tier, [key])
            raise
        if not noted:  # deleted while it was being written
            delete_from(self.tier, [key])
        return noted

    def bury(self, keys: Sequence[str]) -> None:
        """Note that the files of these chunks are gone. One that could not be removed stays doomed: the next
        opening tries again."""
        if keys:
            with contextlib.suppress(TierError):  # they stay doomed, too
                left = self.tier.has(keys) if isinstance(self.tier, DiskTier) else set()
                self._catalogue.buried([key for key in keys if key not in left])

    def lost(self, key: str) -> bool:
        """Note that no tier has a chunk. Returns True if it should be here, so is wanted again."""
        wanted = False
        with contextlib.suppress(StoreError, TierError):
            with self._state:
                if not self.tier.has([key]) and self._catalogue.ready([key]):
                    self._catalogue.mark([key], "pending")
                    wanted = True
            if wanted and isinstance(self.tier, LocalTier):
                self.tier.missed(key)  # nor is it evicted, which would say that nobody wants it
        return wanted

    def released(self) -> list[str]:
        """Return chunks that nobody owns any more, whose records were not yet deleted from every tier."""
        doomed = self._catalogue.doomed()
        return sorted(set(doomed) - self._catalogue.known(doomed))

    def recover(self) -> list[str]:
        """Finish evictions that a crash interrupted. Returns keys of files written and not noted."""
        if isinstance(self.tier, RamTier):
            self._catalogue.mark([key for key, _ in self._catalogue.recent()], "pending")
        if not isinstance(self.tier, DiskTier):
            return []
        doomed = self._catalogue.doomed()
        evicted = self._catalogue.known(doomed)
        self.tier.delete(sorted(evicted))
        self.bury(sorted(evicted))
        with contextlib.suppress(TierError):  # they are prefilled anew
            return sorted(self.tier.has(self._catalogue.pending_keys()))
        return []


def _has(tier: Tier, key: str) -> bool:
    try:
        return bool(tier.has([key]))
    except TierError:
        return False


def delete_from(tier: Tier, keys: Sequence[str]) -> int | None:
    """Delete records from a tier. Returns how many it had; None if it cannot be reached, or keeps a file.
    A tier that is only read keeps its own."""
    if tier.spec.writes == "never":
        return 0
    try:
        dropped = tier.delete(keys)
        left = isinstance(tier, DiskTier) and tier.has(keys)  # the folder is read-only now
    except TierError:
        return None
    return None if left else dropped
