"""The KV store as the engine's worker sees it: a stack of tiers under one catalogue."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from blendrag.errors import ConfigError, StoreError
from blendrag.store.catalogue import Catalogue
from blendrag.store.identity import KVIdentity
from blendrag.store.miss import Miss, Reason
from blendrag.store.record import DamagedError, Layout, Record
from blendrag.store.tiers import DiskTier, Opened, RamTier, Read, Tier, TierError, TierSpec, make_tier

_FLUSH_INTERVAL_S = 5.0

Wanted = Sequence[tuple[str, Sequence[int]]]


class KVStore:
    """Open with :meth:`open`. Thread-safe. Tiers are asked in order; what a slower one had, the faster ones
    get.

    Its *home* is the first tier below RAM that may be written: a chunk that is there counts as stored.
    Nothing but chunks that were prefilled alone is ever put here, so a stream of new questions adds nothing
    (D3).
    """

    def __init__(
        self, catalogue: Catalogue, tiers: Sequence[Tier], layout: Layout, evicted: list[str]
    ) -> None:
        """``evicted`` grows with the keys that have left home; the catalogue hears of them in batches."""
        self.layout, self.tiers = layout, tuple(tiers)
        self._catalogue = catalogue
        self.ram = next((tier for tier in tiers if isinstance(tier, RamTier)), None)
        self._home = tiers[home_at([tier.spec for tier in tiers])]
        self._evicted = evicted
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="blendrag-behind")
        self._uses: dict[str, tuple[int, int]] = {}
        self._now = 0  # of the last use
        self._counted: dict[str, dict[str, int]] = {}
        self._flushed = time.monotonic()
        self._lock = threading.Lock()  # uses and counts that are not written yet
        self._state = threading.Lock()  # whether a record is there and what the catalogue says of it

    @classmethod
    def open(cls, root: Path, identity: KVIdentity, dtype: str, stack: Sequence[TierSpec]) -> KVStore:
        """Open or create the store in ``root``. dtype: what the engine computes in.

        Finishes what a crash interrupted. Raises StoreMismatchError for another model's store, ConfigError.
        """
        catalogue = Catalogue.open(root, identity)
        try:
            catalogue.settle_dtype(dtype)
            layout = Layout(identity, dtype)
            gone: list[str] = []
            home = home_at(stack)
            later = any(spec.writes != "never" for spec in stack[home + 1 :])

            def evicted(key: str) -> None:
                catalogue.evict([key], keep_ready=later)
                gone.append(key)
                if not later:
                    for tier in tiers[:home]:
                        if isinstance(tier, RamTier):
                            tier.delete([key])

            if len({spec.label for spec in stack}) < len(stack):
                raise ConfigError("two tiers of a stack are the same")
            tiers = [
                make_tier(spec, layout, root / "kv", catalogue.recent, evicted if at == home else None)
                for at, spec in enumerate(stack)
            ]
            store = cls(catalogue, tiers, layout, gone)
            store._recover()
        except BaseException:
            catalogue.close()
            raise
        return store

    # -- writing ------------------------------------------------------------------------------------------

    def put(self, key: str, token_ids: Sequence[int], kv: torch.Tensor) -> int:
        """Store the KV of a chunk, [layers, 2 (K before RoPE, V), tokens, kv_heads, head_size]; its bytes, 0
        if the catalogue does not want it (any more).

        Raises StoreFullError or StoreError, leaving nothing behind.
        """
        if not self._catalogue.knows(key):
            return 0
        return self.keep(self.layout.encode(key, token_ids, kv))

    def keep(self, record: Record) -> int:
        """:meth:`put` of a record."""
        self._announce(record.key)
        try:
            self._home.put(record)
        except TierError as error:
            raise StoreError(f"the {self._home.name} tier cannot be written: {error}") from error
        finally:
            gone, self._evicted[:] = list(self._evicted), []
            self._bury(gone)
        if not self._note_ready(record):
            return 0
        for tier in self.tiers:
            if tier is not self._home and tier.spec.writes == "through":
                self._copy(tier, record)
            elif tier is not self._home and tier.spec.writes == "behind":
                self._behind.submit(self._copy, tier, record)
        self._drop_if_deleted(record.key)
        self._use(record.key)
        return record.head.nbytes

    def _announce(self, key: str) -> None:
        """A chunk that nobody waits for has no claim to a file: until :meth:`_note_ready`, a crash makes it
        one to be deleted."""
        if isinstance(self._home, DiskTier):
            entries = self._catalogue.entries_of([key])
            if not entries or entries[0].state == "evicted":
                self._catalogue.evict([key])

    def _note_ready(self, record: Record) -> bool:
        key = record.key
        with self._state:
            try:
                noted = bool(self._home.has([key])) and self._catalogue.mark_ready(key, record.head.nbytes)
            except (StoreError, TierError):
                if not self._catalogue.ready([key]):  # what was acknowledged before stays
                    self._delete_from(self._home, [key])
                raise
            if not noted:  # deleted while it was being written
                self._delete_from(self._home, [key])
            return noted

    @staticmethod
    def _copy(tier: Tier, record: Record) -> None:
        with contextlib.suppress(StoreError, TierError):  # counted by the tier; the record is at home
            tier.put(record)

    def delete(self, keys: Iterable[str]) -> tuple[int, list[str]]:
        """Drop chunks from all tiers: how many home had, and the names of tiers that could not be reached."""
        keys = list(keys)
        dropped, unreachable = 0, []
        for tier in reversed(self.tiers):  # RAM last: what is read meanwhile comes from below
            there = self._delete_from(tier, keys)
            if there is None:
                unreachable.append(tier.name)
            elif tier is self._home:
                dropped = there
        self._bury(keys)
        return dropped, unreachable

    def _bury(self, keys: Sequence[str]) -> None:
        """Files that could not be removed stay doomed: the next opening tries again."""
        if keys:
            left = self._home.has(keys) if isinstance(self._home, DiskTier) else set()
            self._catalogue.buried([key for key in keys if key not in left])

    def _drop_if_deleted(self, key: str) -> None:
        """Of two threads, one may give a chunk to RAM that the other has just deleted."""
        if self.ram is not None and not self._catalogue.knows(key):
            self.ram.delete([key])

    @staticmethod
    def _delete_from(tier: Tier, keys: Sequence[str]) -> int | None:
        if tier.spec.writes == "never":
            return 0
        try:
            return tier.delete(keys)
        except TierError:
            return None

    # -- reading ------------------------------------------------------------------------------------------

    def open_records(self, wanted: Wanted) -> list[Opened | Miss]:
        """Per (key, token ids) the record whose chunk begins with these tokens, or why there is none.

        Close what was opened with :meth:`close_records`. A damaged record is put aside; the next tier is
        asked.
        """
        found: dict[str, Opened] = {}
        reasons: dict[str, Reason] = {}
        for tier in self.tiers:
            missing = list(dict.fromkeys(key for key, _ in wanted if key not in found))
            if not missing:
                break
            for key, one in self._opened_in(tier, missing).items():
                if isinstance(one, Opened):
                    found[key] = one
                elif isinstance(one, DamagedError):
                    self._put_aside(tier, key)
                    reasons[key] = "damaged"
                else:
                    reasons.setdefault(key, "unavailable")
        answers: list[Opened | Miss] = []
        for key, token_ids in wanted:
            if key not in found:
                answers.append(self._miss(key, reasons.get(key, "missing")))
            elif not found[key].head.starts_with(token_ids):
                answers.append(Miss("mismatch"))
            else:
                answers.append(found[key])
                self._use(key)
        used = {id(one) for one in answers}
        self.close_records([one for one in found.values() if id(one) not in used])
        if self._home.local:
            self._home.used([key for key, one in found.items() if one.tier is not self._home])
        self._flush_if_due()
        return answers

    @staticmethod
    def _opened_in(tier: Tier, keys: Sequence[str]) -> Mapping[str, Opened | Exception]:
        try:
            return tier.open(keys)
        except TierError as error:
            return {key: error for key in keys}

    def close_records(self, opened: Iterable[Opened | Miss]) -> None:
        for one in opened:
            if isinstance(one, Opened):
                one.tier.close_record(one)

    def get(self, key: str, token_ids: Sequence[int]) -> Record | Miss:
        """The whole record, verified, which the faster tiers then have too."""
        (opened,) = self.open_records([(key, token_ids)])
        if isinstance(opened, Miss):
            return opened
        try:
            record = read_whole(opened)
        except DamagedError:
            return self.damaged(opened)
        except TierError:
            return Miss("unavailable")
        finally:
            self.close_records([opened])
        self.promote(record, opened.tier)
        return record

    def promote(self, record: Record, found_in: Tier) -> None:
        """Give a verified record to the tiers that are faster than the one it was found in."""
        for tier in self.tiers[: self.tiers.index(found_in)]:
            full = isinstance(tier, RamTier) and not tier.admits(record.head.nbytes)
            if full or tier.spec.writes == "never":
                continue
            with contextlib.suppress(StoreError, TierError):
                if tier is self._home:
                    self._announce(record.key)
                tier.put(record)
                tier.count(promotions=1)
                if tier is self._home:
                    self._note_ready(record)
        self._drop_if_deleted(record.key)

    def promote_behind(self, records: Sequence[Record], found_in: Sequence[Tier]) -> None:
        """:meth:`promote`, in the background."""
        for record, tier in zip(records, found_in, strict=True):
            self._behind.submit(self.promote, record, tier)

    def prefetch(self, key: str) -> None:
        """Bring a chunk into the RAM tier, if it can be had and kept."""
        if self.ram is not None and self.ram.admits(1) and not self.ram.has([key]):
            self.get(key, ())

    def adopt(self, wanted: Wanted) -> set[str]:
        """Keys of those chunks that another engine has put into a tier below home: they are home now."""
        if self.tiers[-1] is self._home:
            return set()
        wanted = [(key, token_ids) for key, token_ids in wanted if self._catalogue.knows(key)]
        adopted: set[str] = set()
        for opened, (key, token_ids) in zip(self.open_records(wanted), wanted, strict=True):
            if isinstance(opened, Miss):
                continue
            with contextlib.suppress(DamagedError, TierError):  # then it is prefilled, as any other
                if opened.head.tokens == len(token_ids):
                    self.promote(read_whole(opened), opened.tier)
                    if self._home.has([key]):
                        adopted.add(key)
            self.close_records([opened])
        return adopted

    def damaged(self, opened: Opened) -> Miss:
        """A row of an opened record failed its checksum: it is put aside, and wanted again."""
        self.close_records([opened])
        self._put_aside(opened.tier, opened.head.key)
        return self._miss(opened.head.key, "damaged")

    def _put_aside(self, tier: Tier, key: str) -> None:
        if isinstance(tier, DiskTier) and tier.spec.writes != "never":
            tier.quarantine(key)
        else:
            tier.count(damaged=1)
            self._delete_from(tier, [key])

    def _miss(self, key: str, reason: Reason) -> Miss:
        if reason in ("missing", "damaged"):
            with self._state, contextlib.suppress(StoreError, TierError):
                if not self._home.has([key]) and self._catalogue.ready([key]):
                    self._catalogue.mark([key], "pending")
        return Miss(reason)

    # -- books --------------------------------------------------------------------------------------------

    def _use(self, key: str) -> None:
        with self._lock:
            self._now = max(self._now + 1, time.time_ns())  # the clock may be set back
            _, times = self._uses.get(key, (0, 0))
            self._uses[key] = (self._now, times + 1)

    def _flush_if_due(self) -> None:
        """A transaction per read would cost more than the read."""
        if time.monotonic() - self._flushed > _FLUSH_INTERVAL_S:
            self._flushed = time.monotonic()
            self._behind.submit(self._flush)

    def _flush(self) -> None:
        with self._lock:
            uses, self._uses = self._uses, {}
        with contextlib.suppress(StoreError):  # bookkeeping is not worth a request
            self._catalogue.touch(uses)
            for tier in self.tiers:
                now, before = tier.stats(), self._counted.get(tier.name, {})
                growth = {name: now[name] - before.get(name, 0) for name in now if name not in _LEVELS}
                self._catalogue.count(tier.name, {name: by for name, by in growth.items() if by})
                self._counted[tier.name] = now

    def stats(self) -> dict[str, Any]:
        """Counters per tier, fastest first."""
        counts = {tier.name: tier.stats() for tier in self.tiers}
        if isinstance(self._home, DiskTier):  # the catalogue knows, whatever the tier has seen
            totals = self._catalogue.totals()
            counts[self._home.name] |= {"chunks": totals.ready, "bytes": totals.bytes}
        return counts

    def wait(self) -> None:
        """Until what is written behind is written."""
        self._behind.submit(lambda: None).result()

    def close(self) -> None:
        self._behind.shutdown()
        self._flush()
        for tier in self.tiers:
            with contextlib.suppress(TierError):
                tier.close()
        self._catalogue.close()

    def _recover(self) -> None:
        """What a crash interrupted: deletions that were decided, and records written but not noted."""
        home, catalogue = self._home, self._catalogue
        if home is self.ram:
            catalogue.mark([key for key, _ in catalogue.recent()], "pending")
        if not isinstance(home, DiskTier):
            return
        for tier in self.tiers:
            if isinstance(tier, DiskTier) and tier.spec.writes != "never":
                tier.sweep()
        doomed = catalogue.doomed()
        home.delete(doomed)
        self._bury(doomed)
        for key in home.has(catalogue.pending_keys()):
            record = self.get(key, ())
            if isinstance(record, Record):
                catalogue.mark_ready(key, record.head.nbytes)
        home.trim()


_LEVELS = ("chunks", "bytes")


def read_whole(opened: Opened) -> Record:
    """All rows of an opened record, verified. Raises DamagedError, TierError."""
    head = opened.head
    if isinstance(opened.source, Record):
        return opened.source
    into = torch.empty(head.layout.num_layers, head.row_bytes, dtype=torch.uint8)
    (rows,) = opened.tier.read([Read(opened, 0, head.layout.num_layers, into)])
    head.verify(0, rows)
    return Record(head, rows)


def home_at(stack: Sequence[TierSpec]) -> int:
    """Which tier it is where a chunk counts as stored. Raises ConfigError if none may be written."""
    writable = [at for at, spec in enumerate(stack) if spec.writes != "never"]
    if not writable:
        raise ConfigError("none of the tiers may be written")
    return next((at for at in writable if stack[at].kind != "ram"), writable[0])
