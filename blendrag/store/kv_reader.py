"""A reader of a KV store that another process keeps: the store's tiers, and RAM of its own."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from blendrag.store.identity import KVIdentity
from blendrag.store.policies import Policies
from blendrag.store.record import DamagedError, Layout, Miss, Reason, Record
from blendrag.store.replicas import Replicas
from blendrag.store.stack import TierSpec
from blendrag.store.tiers import Context, Opened, RamTier, Read, Tier, TierError, make_tier

WantedChunks = Sequence[tuple[str, Sequence[int]]]


class KVReader:
    """A reader of a KV store. Thread-safe. Tiers are asked in order; records of a slower tier are copied to
    the faster ones. Of a record with several shards, it reads those of its own heads.

    An engine's other ranks have one each. The first rank has the :class:`~blendrag.store.kv_store.KVStore`, a
    reader that also stores, and keeps the catalogue in step. ``replicas``: the copies in the other tiers.
    ``policies``: the calls to those by which chunks leave.
    """

    def __init__(self, tiers: Sequence[Tier], layout: Layout, replicas: Replicas) -> None:
        self.layout, self.tiers, self.replicas = layout, tuple(tiers), replicas
        self.ram = next((tier for tier in tiers if isinstance(tier, RamTier)), None)
        self.policies = Policies(tiers)

    @classmethod
    def open(
        cls,
        root: Path,
        identity: KVIdentity,
        dtype: str,
        stack: Sequence[TierSpec],
        own: range | None = None,
        shards: int = 1,
        *,
        layout: Layout | None = None,
    ) -> KVReader:
        """Open a reader of the store in ``root``, which the owner has opened. ``own``: the KV heads that this
        process has. layout: for records that are no chunks. Raises ConfigError, StoreError."""
        layout, tiers = layout or Layout(identity, dtype, own, shards), list[Tier]()
        try:
            for spec in stack:
                read_only = spec if spec.kind == "ram" else spec.model_copy(update={"write": "never"})
                tiers.append(make_tier(read_only, layout, Context(root / "kv")))
        except BaseException:
            close_all(tiers)
            raise
        return cls(tiers, layout, Replicas(tiers))

    # -- reading ------------------------------------------------------------------------------------------

    def open_records(self, wanted: WantedChunks, *, use: bool = False) -> list[Opened | Miss]:
        """Return, for each (key, token ids), the record whose chunk begins with these tokens, or why there is
        none.

        Close what was opened with :meth:`close_records`. A damaged record is put aside; the next tier is
        asked. ``use``: a prompt has these chunks, in this order, which counts as a use of them.
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
                answers.append(Miss(reasons.get(key, "missing")))
            elif not found[key].head.starts_with(token_ids):
                answers.append(Miss("mismatch"))
            else:
                answers.append(found[key])
        used = {id(one) for one in answers}
        self.close_records([one for one in found.values() if id(one) not in used])
        if use:
            there = [isinstance(answer, Opened) for answer in answers]
            prompt = [key for key, _ in wanted]
            self.policies.used(prompt, itertools.compress(prompt, there))
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
        """Return what this process reads of the record, verified, for the faster tiers, too."""
        (opened,) = self.open_records([(key, token_ids)])
        if isinstance(opened, Miss):
            return opened
        try:
            record = self.read(opened)
        except DamagedError:
            self.damaged(opened.tier.name, key)
            return Miss("damaged")
        except TierError:
            return Miss("unavailable")
        finally:
            self.close_records([opened])
        self.replicas.promote(record, opened.tier)
        return record

    def read(self, opened: Opened) -> Record:
        """Return what this process reads of an opened record, verified; all of it where a faster tier would
        keep that. Raises DamagedError, TierError."""
        head = opened.head
        whole = self.replicas.want_whole(opened)
        return read_rows(opened, range(head.num_rows) if whole else head.own_rows)

    def prefetch(self, key: str) -> None:
        """Bring a chunk into the RAM tier, if it can be had and kept."""
        if self.ram is not None and self.ram.admits(1) and not self.ram.has([key]):
            self.get(key, ())

    def empty_ram(self) -> None:
        """Drop what the RAM tier has, to see what reading it again takes."""
        self.wait()
        if self.ram is not None:
            self.ram.clear()

    def damaged(self, tier: str, key: str) -> None:
        """Put aside a record of which a row in this tier failed its checksum; its chunk is wanted again. Only
        the owner does this, whoever has read the record."""

    def used(self, prompt: Sequence[str]) -> None:
        """Note that a prompt had these chunks' KV from elsewhere, which is a use of those that are here."""
        self.policies.used(prompt, prompt)

    def _put_aside(self, tier: Tier, key: str) -> None:
        tier.count(damaged=1)

    # -- what leaves --------------------------------------------------------------------------------------

    def delete(self, keys: Iterable[str], *, everywhere: bool = False) -> tuple[int, list[str]]:
        """Drop what RAM has of these chunks; none counts as dropped."""
        keys = list(keys)
        with self.replicas.leaving(keys):
            if self.ram is not None:
                self.ram.delete(keys)
        return 0, []

    # -- the rest -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return counters per tier, fastest first."""
        return {tier.name: tier.stats() for tier in self.tiers}

    def wait(self) -> None:
        """Wait until what is written behind is written."""
        self.replicas.wait()

    def close(self) -> None:
        self.replicas.close()
        close_all(self.tiers)


def close_all(tiers: Iterable[Tier]) -> None:
    for tier in tiers:
        with contextlib.suppress(TierError):
            tier.close()


def read_whole(opened: Opened) -> Record:
    """Return all rows of an opened record, verified. Raises DamagedError, TierError."""
    return read_rows(opened, range(opened.head.num_rows))


def read_rows(opened: Opened, rows: range) -> Record:
    """Do as :func:`read_whole`, for some rows; of a record in RAM, return what is there."""
    head = opened.head
    if isinstance(opened.source, Record):
        return opened.source
    into = torch.empty(len(rows), head.row_bytes, dtype=torch.uint8)
    (read,) = opened.tier.read([Read(opened, rows.start, rows.stop, into)])
    head.verify(rows.start, read)
    return Record(head, read, rows.start)
