"""What the worker gives back, of its model and of operations on a store. It crosses as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from blendrag.machine import Machine


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a running engine is.

    reason: why its model cannot be blended; None if it can.
    blocks: what names the bytes of its KV blocks, which no other engine may take for its own;
    "" where they are not kept.
    """

    architecture: str
    device: str
    dtype: str
    vllm: str
    threads: int
    block_size: int
    reason: str | None
    num_layers: int = 0
    blocks: str = ""

    def machine(self, model: str) -> Machine:
        """What it runs on. model: as the user names it."""
        return Machine.here(model, threads=self.threads, device=self.device, vllm=self.vllm, dtype=self.dtype)


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
