"""The interface of tiers: what the store asks of RAM, disk, and servers elsewhere."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from blendrag.names import Registry
from blendrag.store.record import Head, Layout, Record
from blendrag.store.stack import TierSpec


class TierError(Exception):
    """A tier could not do what was asked, and may be able to later. Never leaves the store."""


class GoneError(TierError):
    """A record that was opened is not there any more. The message is "key: what happened"."""

    @property
    def key(self) -> str:
        return str(self).partition(":")[0]


LEVELS = ("chunks", "bytes")
"""The statistics that say what a tier holds now, as far as it knows; the others grow."""

_COUNTERS = ("hits", "misses", "puts", "promotions", "evictions", "damaged", "errors", "refused")
"""The other statistics, since the tier was opened. errors: calls that failed. refused: calls that were not
made, because the tier had failed just before."""


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A record found in a tier: its head has been read and verified, its rows have not.

    Close it with the tier's ``close_record`` when its rows are read. ``source`` is the tier's own business.
    """

    tier: Tier
    head: Head
    source: object = None


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """A request for rows [first, last) of an opened record. into: uint8 [last - first, row], where a tier
    that has to copy anyway puts them."""

    opened: Opened
    first: int
    last: int
    into: torch.Tensor


Found = Callable[[], Iterable[tuple[str, int]]]
"""A function that returns (key, bytes) of the records that are there, least recently used first."""


@dataclass(frozen=True, slots=True)
class Context:
    """The facts of its index that a tier on this machine has to know.

    folder: for the files of a disk tier without a path of its own. found: what is in it; None: it is
    searched. on_evict: see LocalTier.
    """

    folder: Path
    found: Found | None = None
    on_evict: Callable[[str], None] | None = None


class Tier(ABC):
    """The interface of a tier, which keeps records. Thread-safe. ``group``: layers that are best asked for at
    once (more where a call is slow)."""

    group: int = 1

    def __init__(self, spec: TierSpec, layout: Layout) -> None:
        self.spec, self.layout, self.name = spec, layout, spec.label
        self._stats = dict.fromkeys(LEVELS + _COUNTERS, 0)
        self._lock = threading.RLock()  # bookkeeping: held for moments

    @classmethod
    def make(cls, spec: TierSpec, layout: Layout, context: Context) -> Tier:
        """Make the tier that ``spec`` describes. Raises ConfigError (a url that cannot be used), StoreError.
        A server is not asked yet."""
        return cls(spec, layout)

    @property
    def counted(self) -> bool:
        """Return whether ``chunks`` and ``bytes`` of its statistics are all that it holds."""
        return False

    def open(self, keys: Sequence[str]) -> Mapping[str, Opened | Exception]:
        """Open those of ``keys`` that are there. Each is opened, or has the DamagedError or TierError of its
        own.

        Counts hits and misses. Raises TierError if the tier as a whole fails.
        """
        found = self._open(keys)
        hits = sum(isinstance(one, Opened) for one in found.values())
        errors = sum(isinstance(one, TierError) for one in found.values())
        self.count(hits=hits, misses=len(set(keys)) - hits, errors=errors)
        return found

    @abstractmethod
    def _open(self, keys: Sequence[str]) -> Mapping[str, Opened | Exception]:
        """Do as :meth:`open`, and count nothing."""

    @abstractmethod
    def read(self, wanted: Sequence[Read]) -> list[torch.Tensor]:
        """Return the rows of each, as uint8 [last - first, row], not verified: in ``into``, or where they are
        already.

        Raises DamagedError (cut off meanwhile), GoneError, TierError.
        """

    def close_record(self, opened: Opened) -> None:  # noqa: B027  (most have nothing to do)
        """Give back what ``open`` took. Safe to call twice."""

    @abstractmethod
    def put(self, record: Record) -> None:
        """Keep a record, wholly or not at all. Raises StoreFullError, StoreError, TierError."""

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> int:
        """Drop records. Returns how many there were. Raises TierError."""

    @abstractmethod
    def has(self, keys: Iterable[str]) -> set[str]:
        """Return those of ``keys`` that are there. Counts nothing. Raises TierError."""

    def stats(self) -> dict[str, int]:
        with self._lock:
            return dict(self._stats)

    def close(self) -> None:  # noqa: B027
        """Give back connections and files."""

    def count(self, **counts: int) -> None:
        """Add to the statistics."""
        with self._lock:
            for name, by in counts.items():
                self._stats[name] += by


TIERS = Registry[Tier]("tier")
register_tier = TIERS.register


def make_tier(spec: TierSpec, layout: Layout, context: Context) -> Tier:
    """Make a tier of the kind that ``spec`` names (:meth:`Tier.make`), as slow as it says."""
    tier = TIERS[spec.kind].make(spec, layout, context)
    return throttle(tier, spec.throttle) if spec.throttle else tier


def throttle(tier: Tier, bytes_per_s: int) -> Tier:
    """Have ``tier`` read at most ``bytes_per_s``, as a slower device would. Returns it."""
    read = tier.read
    due = time.perf_counter()

    def slowly(wanted: Sequence[Read]) -> list[torch.Tensor]:
        nonlocal due
        due = max(due, time.perf_counter()) + sum(one.into.numel() for one in wanted) / bytes_per_s
        rows = read(wanted)
        time.sleep(max(0.0, due - time.perf_counter()))
        return rows

    tier.read = slowly  # type: ignore[method-assign]
    return tier
