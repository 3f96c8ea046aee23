"""Copies of records in the other tiers: of what is stored in slower ones, of what is read in faster ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from blendrag.errors import StoreError
from blendrag.store.background import Background
from blendrag.store.catalogue import Catalogue
from blendrag.store.home import Home, delete_from
from blendrag.store.record import Record
from blendrag.store.tiers import Opened, RamTier, Tier, TierError

_MOST_WAITING = 512 << 20  # bytes of records that wait to be written behind


class Copies:
    """Thread-safe. What fails is counted by the tier; the record is at home. A chunk that is deleted while a
    copy of it is under way is deleted there, too."""

    def __init__(self, catalogue: Catalogue, tiers: Sequence[Tier], home: Home) -> None:
        self._catalogue, self._tiers, self._home = catalogue, tiers, home
        self._behind = Background("copies", _MOST_WAITING)  # to slower tiers: the writer waits for room
        self._promotions = Background("promotions", _MOST_WAITING)  # to faster ones: left if there is none
        self._leaving: set[str] = set()  # deleted, while copies of them may still be under way

    def store(self, record: Record) -> bool:
        """Store the record at home, and copy it to the tiers that are written through or behind; False if
        the catalogue does not want it (any more). Raises StoreError, leaving nothing behind."""
        self._leaving.discard(record.key)
        try:
            if not self._home.put(record):
                return False
        except TierError as error:
            raise StoreError(f"the {self._home.tier.name} tier cannot be written: {error}") from error
        for tier in self._tiers:
            if tier is not self._home.tier and tier.spec.writes == "through":
                self._copy(tier, record)
            elif tier is not self._home.tier and tier.spec.writes == "behind":
                self._behind.do(partial(self._copy, tier, record), record.nbytes)
        if not self._wanted(record.key):  # of two threads, one may copy what the other has just deleted
            for tier in self._tiers:
                if isinstance(tier, RamTier):
                    tier.delete([record.key])
        return True

    def wants(self, opened: Opened) -> bool:
        """Whether a tier that is faster than the record's would keep it."""
        return bool(self._faster(opened.tier, opened.head.nbytes))

    def promote(self, record: Record, found_in: Tier) -> None:
        """Give a verified record to the tiers that are faster than the one it was found in."""
        for tier in self._faster(found_in, record.head.nbytes):
            if self._copy(tier, record):
                tier.count(promotions=1)

    def promote_behind(self, records: Sequence[Record], found_in: Sequence[Tier]) -> None:
        """:meth:`promote`, in the background, as far as there is room for it."""
        for record, tier in zip(records, found_in, strict=True):
            self._promotions.do_if_room(partial(self.promote, record, tier), record.nbytes)

    def beside_promotions(self, work: Callable[[], object]) -> None:
        """Run something else in the background, if there is room."""
        self._promotions.do_if_room(work)

    @contextmanager
    def leaving(self, keys: Sequence[str]) -> Iterator[None]:
        """While these chunks are deleted, and until all copies that are under way are done, no tier gets
        them, unless they are stored anew."""
        self._leaving.update(keys)
        try:
            yield
        finally:
            self._behind.do(partial(self._promotions.do, partial(self._leaving.difference_update, keys)))

    def wait(self) -> None:
        """Until what is under way is done."""
        self._behind.wait()
        self._promotions.wait()

    def close(self) -> None:
        self._behind.close()
        self._promotions.close()

    def _copy(self, tier: Tier, record: Record) -> bool:
        """Whether the tier has it now."""
        if not self._wanted(record.key):
            return False
        there = False
        with contextlib.suppress(StoreError, TierError):
            if tier is self._home.tier:
                self._home.put(record)
            else:
                tier.put(record)
            there = True
        if not self._wanted(record.key):  # deleted meanwhile
            delete_from(tier, [record.key])
        return there

    def _wanted(self, key: str) -> bool:
        return key not in self._leaving and self._catalogue.knows(key)

    def _faster(self, found_in: Tier, nbytes: int) -> list[Tier]:
        return [
            tier
            for tier in self._tiers[: self._tiers.index(found_in)]
            if tier.spec.writes != "never" and not (isinstance(tier, RamTier) and not tier.admits(nbytes))
        ]
