"""The KV store as the engine's worker sees it: a stack of tiers under one catalogue."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from blendrag.eviction.hazard import Hazard
from blendrag.store.catalogue import Catalogue
from blendrag.store.identity import NO_CONTEXT, KVIdentity
from blendrag.store.policies import Policies
from blendrag.store.primary import Primary, delete_from
from blendrag.store.record import DamagedError, Layout, Miss, Reason, Record
from blendrag.store.replicas import Replicas
from blendrag.store.stack import TierSpec, primary_at
from blendrag.store.tiers import Context, DiskTier, Opened, RamTier, Read, Tier, TierError, make_tier
from blendrag.store.tiers.local import Forecast, LocalTier
from blendrag.store.usage_log import UsageLog

Wanted = Sequence[tuple[str, Sequence[int]]]


class KVStore:
    """Open with :meth:`open`. Thread-safe. Tiers are asked in order; what a slower one had, the faster ones
    get.

    Its *primary tier* is the first below RAM that may be written: a chunk that is there counts as stored.
    Nothing but chunks that were prefilled apart is ever put here, so a stream of new questions adds nothing
    (D3). ``replicas`` are what the other tiers have.
    """

    def __init__(self, catalogue: Catalogue, tiers: Sequence[Tier], layout: Layout, primary: Primary) -> None:
        self.layout, self.tiers = layout, tuple(tiers)
        self._catalogue, self._primary = catalogue, primary
        self.ram = next((tier for tier in tiers if isinstance(tier, RamTier)), None)
        self._usage, self._policies = UsageLog(catalogue, tiers), Policies(tiers)
        self.replicas = Replicas(catalogue, tiers, primary)

    @classmethod
    def open(cls, root: Path, identity: KVIdentity, dtype: str, stack: Sequence[TierSpec]) -> KVStore:
        """Open or create the store in ``root``. dtype: what the engine computes in.

        Finishes what a crash interrupted. Raises StoreMismatchError for another model's store, ConfigError.
        """
        catalogue = Catalogue.open(root, identity)
        tiers: list[Tier] = []
        try:
            catalogue.settle_dtype(dtype)
            layout, at = Layout(identity, dtype), primary_at(stack)
            primary = Primary(catalogue)
            for own, spec in enumerate(stack):
                evicting = primary.evicting if own == at else None
                tiers.append(make_tier(spec, layout, Context(root / "kv", catalogue.recent, evicting)))
            primary.attach(tiers[at], tiers[:at], tiers[at + 1 :])
            store = cls(catalogue, tiers, layout, primary)
            store._recover()
        except BaseException:
            _close_all(tiers)
            catalogue.close()
            raise
        return store

    # -- writing ------------------------------------------------------------------------------------------

    def put(self, key: str, token_ids: Sequence[int], kv: torch.Tensor, context: str = NO_CONTEXT) -> int:
        """Store the KV of a chunk, [layers, 2 (K before RoPE, V), tokens, kv_heads, head_size]; its bytes, 0
        if the catalogue does not want it (any more).

        Raises StoreFullError or StoreError, leaving nothing behind.
        """
        if not self._catalogue.knows(key):
            return 0
        return self.keep(self.layout.encode(key, token_ids, kv, context))

    def keep(self, record: Record) -> int:
        """:meth:`put` of a record."""
        if not self.replicas.store(record):
            return 0
        self._usage.seen(record.key)
        return record.head.nbytes

    def delete(self, keys: Iterable[str], *, everywhere: bool = False) -> tuple[int, list[str]]:
        """Drop chunks from all tiers: how many the primary tier had, and the names of tiers that could not be
        reached.

        Those are tried again when the store is next opened. With ``everywhere``, nothing is dropped here
        unless all of them could be reached.
        """
        keys = list(keys)
        with self.replicas.leaving(keys):
            return self._delete(keys, everywhere)

    def _delete(self, keys: Sequence[str], everywhere: bool) -> tuple[int, list[str]]:
        primary = self._primary.tier
        unreachable = [
            tier.name
            for tier in reversed(self.tiers)
            if tier.local is False and tier is not primary and delete_from(tier, keys) is None
        ]
        dropped = 0
        if not (everywhere and unreachable):
            for tier in reversed(self.tiers):  # RAM last: what is read meanwhile comes from below
                if tier is primary or tier.local:
                    there = delete_from(tier, keys)
                    if there is None:
                        unreachable.append(tier.name)
                    elif tier is primary:
                        dropped = there
            if not unreachable:
                self._primary.bury(keys)
        return dropped, unreachable

    # -- reading ------------------------------------------------------------------------------------------

    def open_records(self, wanted: Wanted, *, use: bool = False) -> list[Opened | Miss]:
        """Per (key, token ids) the record whose chunk begins with these tokens, or why there is none.

        Close what was opened with :meth:`close_records`. A damaged record is put aside; the next tier is
        asked. ``use``: for a prompt, whose chunks these are in its order, and which counts as a use of them.
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
                self._usage.seen(key, uses=int(use))
        used = {id(one) for one in answers}
        self.close_records([one for one in found.values() if id(one) not in used])
        if use:
            there = [isinstance(answer, Opened) for answer in answers]
            prompt = [key for key, _ in wanted]
            self._policies.used(prompt, itertools.compress(prompt, there))
        if self._usage.due():
            self.replicas.beside_promotions(self._usage.flush)
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
        self.replicas.promote(record, opened.tier)
        return record

    def prefetch(self, key: str) -> None:
        """Bring a chunk into the RAM tier, if it can be had and kept."""
        if self.ram is not None and self.ram.admits(1) and not self.ram.has([key]):
            self.get(key, ())

    def empty_ram(self) -> None:
        """Drop what the RAM tier has, to see what reading it again takes."""
        self.wait()
        if self.ram is not None:
            self.ram.clear()

    def adopt(self, wanted: Wanted) -> set[str]:
        """Take over those chunks that another engine has put into a tier below the primary one; their
        keys."""
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
            delete_from(tier, [key])

    def _miss(self, key: str, reason: Reason) -> Miss:
        if reason in ("missing", "damaged"):
            self._primary.lost(key)
        return Miss(reason)

    # -- eviction -----------------------------------------------------------------------------------------

    def forecast(self, forecasts: Sequence[Forecast]) -> None:
        """Which conversations go on, for the policies of all tiers of this machine."""
        self._policies.forecast(forecasts)

    def use_policy(self, name: str) -> None:
        """Evict by another policy, in all tiers of this machine. Raises ConfigError for an unknown one."""
        self._policies.use(name)

    def learn(self, hazard: Hazard) -> None:
        """Have policies that go by a model (``lpc+``) go by this one. Raises PredictorError, and changes
        nothing, for one that learned from a prefix cache."""
        self._policies.learn(hazard)

    def policy_stats(self) -> dict[str, dict[str, float]]:
        """How long prompts and forecasts were held up by policies (:meth:`Policies.stats`)."""
        return self._policies.stats()

    # -- the rest -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters per tier, fastest first."""
        counts = {tier.name: tier.stats() for tier in self.tiers}
        if isinstance(self._primary.tier, DiskTier):  # the catalogue knows, whatever the tier has seen
            totals = self._catalogue.totals()
            counts[self._primary.tier.name] |= {"chunks": totals.ready, "bytes": totals.bytes}
        return counts

    def wait(self) -> None:
        """Until what is written behind is written."""
        self.replicas.wait()

    def close(self) -> None:
        self.replicas.close()
        self._usage.flush()
        _close_all(self.tiers)
        self._catalogue.close()

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
            self._primary.tier.trim()


def _close_all(tiers: Iterable[Tier]) -> None:
    for tier in tiers:
        with contextlib.suppress(TierError):
            tier.close()


def read_whole(opened: Opened) -> Record:
    """All rows of an opened record, verified. Raises DamagedError, TierError."""
    head = opened.head
    if isinstance(opened.source, Record):
        return opened.source
    into = torch.empty(head.layout.num_layers, head.row_bytes, dtype=torch.uint8)
    (rows,) = opened.tier.read([Read(opened, 0, head.layout.num_layers, into)])
    head.verify(0, rows)
    return Record(head, rows)
