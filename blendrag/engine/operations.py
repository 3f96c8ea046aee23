"""What the worker's operations on a store give back. They cross as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ingested:
    """tokens: that were prefilled, in ``seconds``; adopted: that a shared tier had; nbytes: written since the
    last ingest or flush."""

    tokens: int
    adopted: int
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Deleted:
    """chunks: that the store's home had; unreachable: names of tiers that could not be asked."""

    chunks: int
    unreachable: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters by tier, of the prefetch, and of what eviction policies were told, by tier."""

    tiers: dict[str, dict[str, int]]
    prefetch: dict[str, int]
    policy_calls: dict[str, dict[str, float]]
