"""The worker's results: facts of its model, and of operations on a store. They cross processes as plain
data."""

from __future__ import annotations

from dataclasses import dataclass

from blendrag.machine import Machine


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The facts of a running engine.

    reason: why its model cannot be blended; None if it can.
    blocks: the name of the format of its KV blocks, so that no other engine takes them for its own;
    "" where they are not kept. block_layers: how many layers they are of, those of a model that drafts among
    them. prefix_caching: whether vLLM has it; it turns it off for some models. states: whether blocks have
    states beside KV.
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
    block_layers: int = 0
    prefix_caching: bool = True
    states: bool = False

    def machine(self, model: str) -> Machine:
        """Return the machine that the engine runs on. model: its name as the user gives it."""
        return Machine.here(model, threads=self.threads, device=self.device, vllm=self.vllm, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class Ingested:
    """The result of an ingest. tokens: prefilled, in ``seconds``. adopted: of chunks that a shared tier had.
    nbytes: written since the last ingest or flush."""

    tokens: int
    adopted: int
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Deleted:
    """The result of a deletion. chunks: how many the store's home had. unreachable: names of tiers that could
    not be asked."""

    chunks: int
    unreachable: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters by tier, of the prefetch, and of the calls of eviction policies, by tier."""

    tiers: dict[str, dict[str, int]]
    prefetch: dict[str, int]
    policy_calls: dict[str, dict[str, float]]
