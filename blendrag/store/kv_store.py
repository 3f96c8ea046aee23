"""The KV store as the engine's worker sees it: a stack of tiers under one catalogue."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from blendrag.errors import ConfigError, StoreError
from blendrag.files.lock import IndexLock
from blendrag.store.catalogue import Catalogue
from blendrag.store.identity import NO_CONTEXT, KVIdentity
from blendrag.store.kv_reader import KVReader, WantedChunks, close_all, read_whole
from blendrag.store.primary import Primary, delete_from
from blendrag.store.record import NO_DRAFTS, DamagedError, DraftLayers, Layout, Miss, Record
from blendrag.store.replicas import Replicas
from blendrag.store.stack import TierSpec, primary_at
from blendrag.store.tiers import Context, DiskTier, GoneError, Opened, RamTier, Tier, TierError, make_tier
from blendrag.store.tiers.interface import LEVELS
from blendrag.store.tiers.local import LocalTier

_INTERVAL_S = 5.0


class UsageLog:
    """A log of uses. Thread-safe. A transaction per read would cost more than the read."""

    def __init__(self, catalogue: Catalogue, tiers: Sequence[Tier]) -> None:
        self._catalogue, self._tiers = catalogue, tiers
        self._uses: dict[str, tuple[int, int]] = {}
        self._now = 0  # the time of the last use
        self._counted: dict[str, dict[str, int]] = {}
        self._flushed = time.monotonic()
        self._lock = threading.Lock()

    def seen(self, key: str, uses: int = 0) -> None:
        """Note that a chunk should not be the next to leave. uses: by how many prompts."""
        with self._lock:
            self._now = max(self._now + 1, time.time_ns())  # the clock may be set back
            _, times = self._uses.get(key, (0, 0))
            self._uses[key] = (self._now, times + uses)

    def due(self) -> bool:
        """Return whether it is time to flush; True once per interval."""
        if time.monotonic() - self._flushed <= _INTERVAL_S:
            return False
        self._flushed = time.monotonic()
        return True

    def flush(self) -> None:
        """Write what has been noted. If that fails it is forgotten: bookkeeping is not worth a request."""
        with self._lock:
            uses, self._uses = self._uses, {}
        with contextlib.suppress(StoreError):
            self._catalogue.touch(uses)
            for tier in self._tiers:
                now, before = tier.stats(), self._counted.get(tier.name, {})
                growth = {name: now[name] - before.get(name, 0) for name in now if name not in LEVELS}
                self._catalogue.count(tier.name, {name: by for name, by in growth.items() if by})
                self._counted[tier.name] = now


class KVStore(KVReader):
    """The KV store of one index. Open it with :meth:`open`. Thread-safe.

    Its *primary tier* is the first below RAM that may be written: a chunk that is there counts as stored.
    Nothing but chunks that were prefilled apart is ever put here, so a stream of new questions adds nothing
    (D3). A damaged record is put aside; the next tier is asked.
    """

    def __init__(self, catalogue: Catalogue, tiers: Sequence[Tier], layout: Layout, primary: Primary) -> None:
        super().__init__(tiers, layout, Replicas(tiers, primary))
        self._catalogue, self._primary = catalogue, primary
        self._usage = UsageLog(catalogue, tiers)
        self._opened = contextlib.ExitStack()

    @classmethod
    def open(
        cls,
        root: Path,
        identity: KVIdentity,
        dtype: str,
        stack: Sequence[TierSpec],
        own: range | None = None,
        shards: int = 1,
        lock_s: float | None = None,
        client: int = 0,
        layout: Layout | None = None,
        parents: Mapping[str, str] | None = None,
    ) -> KVStore:
        """Open or create the store in ``root``. dtype: what the engine computes in. own: the KV heads that
        this process has. shards: how many the records have that it writes. lock_s: the seconds it waits for
        the folder's lock, which it then holds; None: its client holds the lock. client: the process that this
        one ends with. layout: for records that are no chunks.
        parents: see :attr:`LocalTier.parents`.

        Finishes what a crash interrupted. Raises StoreMismatchError for another model's store, ConfigError.
        """
        tiers: list[Tier] = []
        with contextlib.ExitStack() as opened:
            if lock_s is not None:
                opened.callback(IndexLock(root, lock_s, client).release)
            catalogue = Catalogue.open(root, identity)
            opened.callback(catalogue.close)
            opened.callback(close_all, tiers)
            catalogue.settle_dtype(dtype)
            at = primary_at(stack)
            if shards > 1 and stack[at].kind == "ram":
                remedy = "give a disk tree_bytes" if layout else "add a tier below it"
                raise ConfigError(f"{shards} ranks cannot share KV by RAM alone: {remedy}")
            layout = layout or Layout(identity, dtype, own, shards)
            primary = Primary(catalogue, tiers, at)
            for number, spec in enumerate(stack):
                evicting = primary.evicting if number == at else None
                tier = make_tier(spec, layout, Context(root / "kv", catalogue.recent, evicting))
                if isinstance(tier, LocalTier) and parents is not None:
                    tier.parents = parents
                tiers.append(tier)
            store = cls(catalogue, tiers, layout, primary)
            store._recover()
            store._opened = opened.pop_all()
        return store

    # -- writing ------------------------------------------------------------------------------------------

    def put(
        self,
        key: str,
        token_ids: Sequence[int],
        kv: torch.Tensor,
        context: str = NO_CONTEXT,
        drafts: DraftLayers = NO_DRAFTS,
    ) -> int:
        """Store the KV of a chunk, [layers, 2 (K before RoPE, V), tokens, kv_heads, head_size], ``drafts``
        among the layers. Returns its bytes, 0 if the catalogue does not want it (any more).

        Raises StoreFullError or StoreError, leaving nothing behind.
        """
        if not self._catalogue.knows(key):
            return 0
        return self.keep(self.layout.encode(key, token_ids, kv, context, drafts))

    def keep(self, record: Record) -> int:
        """Do as :meth:`put`, with a record."""
        if not self.replicas.store(record):
            return 0
        self._usage.seen(record.key)
        return record.head.nbytes

    def holds(self, key: str) -> bool:
        """Return whether the chunk is stored."""
        return self._primary.holds(key)

    def delete(self, keys: Iterable[str], *, everywhere: bool = False) -> tuple[int, list[str]]:
        """Drop chunks from all tiers. Returns how many the primary tier had, and the names of tiers that
        could not be reached.

        Those are tried again when the store is next opened. With ``everywhere``, nothing is dropped here
        unless all servers and folders elsewhere could be reached, and have kept no file.
        """
        keys = list(keys)
        with self.replicas.leaving(keys):
            return self._delete(keys, everywhere)

    def _delete(self, keys: Sequence[str], everywhere: bool) -> tuple[int, list[str]]:
        primary = self._primary.tier
        elsewhere = [one for one in reversed(self.tiers) if one is not primary and one.spec.elsewhere]
        unreachable = [tier.name for tier in elsewhere if delete_from(tier, keys) is None]
        dropped = 0
        if not (everywhere and unreachable):
            for tier in reversed(self.tiers):  # RAM last: what is read meanwhile comes from below
                if tier not in elsewhere:
                    there = delete_from(tier, keys)
                    if there is None:
                        unreachable.append(tier.name)
                    elif tier is primary:
                        dropped = there
            if not unreachable:
                self._primary.bury(keys)
        return dropped, unreachable

    # -- reading ------------------------------------------------------------------------------------------

    def open_records(self, wanted: WantedChunks, *, use: bool = False) -> list[Opened | Miss]:
        answers = super().open_records(wanted, use=use)
        for (key, _), answer in zip(wanted, answers, strict=True):
            if isinstance(answer, Opened):
                self._usage.seen(key, int(use))
            elif answer.reason in ("missing", "damaged"):
                self._primary.lost(key)
        if self._usage.due():
            self.replicas.after_promotions(self._usage.flush)
        return answers

    def used(self, prompt: Sequence[str]) -> None:
        super().used(prompt)
        for key in prompt:
            self._usage.seen(key, uses=1)

    def adopt(self, wanted: WantedChunks) -> set[str]:
        """Take over what another engine has put into a tier below the primary. Returns the keys."""
        if self.tiers[-1] is self._primary.tier:
            return set()
        wanted = [(key, token_ids) for key, token_ids in wanted if self._catalogue.knows(key)]
        adopted: set[str] = set()
        for opened, (key, token_ids) in zip(self.open_records(wanted), wanted, strict=True):
            if isinstance(opened, Miss):
                continue
            with contextlib.suppress(DamagedError, TierError):  # then it is prefilled, as any other
                if opened.head.tokens == len(token_ids):
                    self.replicas.promote(read_whole(opened), opened.tier)
                    if self._primary.tier.has([key]):
                        adopted.add(key)
            self.close_records([opened])
        return adopted

    def check(self, keys: Iterable[str]) -> list[str]:
        """Read chunks that a reader elsewhere could not use again from every tier but RAM, and put damaged
        records aside. Returns the keys of chunks that no tier has, nor may have that cannot be reached now:
        they are wanted again."""
        keys = list(keys)
        nowhere = dict.fromkeys(keys)
        for tier in self.tiers:
            if isinstance(tier, RamTier):
                continue
            for key, opened in self._opened_in(tier, keys).items():
                try:
                    if isinstance(opened, Exception):
                        raise opened
                    read_whole(opened)
                    nowhere.pop(key, None)
                except DamagedError:
                    self._put_aside(tier, key)
                except GoneError:
                    continue
                except TierError:
                    nowhere.pop(key, None)  # a tier may have it
                finally:
                    self.close_records([opened] if isinstance(opened, Opened) else [])
        return [key for key in nowhere if self._primary.lost(key)]

    def damaged(self, tier: str, key: str) -> None:
        for one in self.tiers:
            if one.name == tier:
                self._put_aside(one, key)
        self._primary.lost(key)

    def _put_aside(self, tier: Tier, key: str) -> None:
        if isinstance(tier, DiskTier) and tier.spec.writes != "never":
            tier.quarantine(key)
        else:
            super()._put_aside(tier, key)
            delete_from(tier, [key])

    # -- the rest -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        counts = super().stats()
        if isinstance(self._primary.tier, DiskTier):  # the catalogue knows, whatever the tier has seen
            totals = self._catalogue.totals()
            counts[self._primary.tier.name] |= {"chunks": totals.ready, "bytes": totals.bytes}
        return counts

    def close(self) -> None:
        self.replicas.close()
        self._usage.flush()
        self._opened.close()

    def _recover(self) -> None:
        for tier in self.tiers:
            if isinstance(tier, DiskTier) and tier.spec.writes != "never":
                tier.sweep()
        written = self._primary.recover()
        self.delete(self._primary.released())
        for key in written:
            record = self.get(key, ())
            if isinstance(record, Record):
                self._catalogue.mark_ready(key, record.head.nbytes)
                if isinstance(self._primary.tier, LocalTier):
                    self._primary.tier.noticed(key, record.head.nbytes)
        if isinstance(self._primary.tier, LocalTier):
            self._primary.tier.trim()
