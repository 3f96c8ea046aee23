"""The cost of a store: of filling it beside plain prefill, and of its codec, on KV that the model made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.generation import Sampling
from blendrag.engine.client.stores import StoreClient
from blendrag.lab.arms import reset
from blendrag.lab.experiment import in_turn
from blendrag.lab.scratch import ScratchStore, scratch_store
from blendrag.progress import Progress
from blendrag.settings import Settings
from blendrag.store.codec import Codec
from blendrag.store.contexts import Chunk
from blendrag.store.record import Layout

EXACT = "raw"
_READ_BACK = 6  # chunks whose KV every codec is measured on
_ONE_TOKEN = Sampling(max_tokens=1)
_CALLS_PER_ROUND = 3  # as in a real ingest, a call's records are written while the next call computes


@dataclass(frozen=True, slots=True)
class IngestCost:
    """The cost of ingest: tokens and seconds of it, and of plain prefill of the same chunks.

    seconds: until everything was on disk; prefill_s: of these, what the model computed.
    """

    tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    prefill_s: float = 0.0
    plain_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "bytes": self.nbytes,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens / self.seconds,
            "prefill_tokens_per_s": self.tokens / self.prefill_s,
            "plain_tokens_per_s": self.tokens / self.plain_s,
            "ratio_to_plain": self.plain_s / self.seconds,
        }


def measure_ingest(
    engine: Engine, settings: Settings, pieces: Sequence[tuple[int, ...]], progress: Progress
) -> IngestCost:
    """Ingest into a store of its own and prefill the same chunks plainly, in turn, a few batches at a time.

    A turn ends when its records are on disk, so that no writing slows the plain prefill after it.
    """
    costs: list[IngestCost] = []
    with scratch_store(engine, settings, pieces, filled=False) as store:
        calls = list(store.batches(store.chunks))
        # Keys that the catalogue does not know: what warms up is not stored.
        unknown = [chunk._replace(key=f"warm-up {chunk.key}") for chunk in calls[0]]
        rounds = [calls[at : at + _CALLS_PER_ROUND] for at in range(0, len(calls), _CALLS_PER_ROUND)]
        ways = {"ingest": _ingest, "plain prefill of the same": _prefill_plainly}
        for turn in in_turn(ways, [[unknown], *rounds], progress):
            cost = turn.arm(store.client, turn.trial)
            if not turn.warms_up:
                costs.append(cost)
    return IngestCost(*(sum(column) for column in zip(*map(astuple, costs), strict=True)))


def _ingest(store: StoreClient, calls: Sequence[Sequence[Chunk]]) -> IngestCost:
    begin = time.perf_counter()
    done = [store.ingest(batch) for batch in calls]
    nbytes = sum(each.nbytes for each in done) + store.flush()
    return IngestCost(
        tokens=sum(each.tokens for each in done),
        nbytes=nbytes,
        seconds=time.perf_counter() - begin,
        prefill_s=sum(each.seconds for each in done),
    )


def _prefill_plainly(store: StoreClient, calls: Sequence[Sequence[Chunk]]) -> IngestCost:
    async def all_at_once(batch: Sequence[Chunk]) -> None:
        await asyncio.gather(*(store.engine.agenerate(chunk.token_ids, _ONE_TOKEN) for chunk in batch))

    reset(store.engine)
    begin = time.perf_counter()
    for batch in calls:
        asyncio.run(all_at_once(batch))
    return IngestCost(plain_s=time.perf_counter() - begin)


@dataclass(frozen=True, slots=True)
class CodecCost:
    """The cost of a codec. k_error, v_error: norm of the difference by norm, mean over chunks and layers.
    kl_from_exact: by arm, of its first tokens against those with the codec ``EXACT``."""

    bytes_per_token: float
    k_error: float
    v_error: float
    kl_from_exact: dict[str, float] = field(default_factory=dict)


def measure_codecs(names: Sequence[str], exact: ScratchStore, dtype: str) -> dict[str, CodecCost]:
    """Return per codec its cost on the KV in ``exact``, a store with the codec ``EXACT``; dtype: the
    engine's."""
    records = exact.read_back(exact.chunks[:_READ_BACK], dtype)
    layouts = {name: Layout(replace(exact.identity, codec=name), dtype) for name in names}
    return {name: measure_codec(layout.codec, records) for name, layout in layouts.items()}


def measure_codec(codec: Codec, records: Sequence[torch.Tensor]) -> CodecCost:
    """Measure a codec on KV as the model made it, each [layers, 2, tokens, heads, size]."""
    layers, _, tokens = records[0].shape[:3]
    key, value = np.mean([_errors(codec, each) for each in records], axis=0)
    return CodecCost(layers * codec.row_bytes(tokens) / tokens, float(key), float(value))


def _errors(codec: Codec, kv: torch.Tensor) -> list[float]:
    """Return the relative error of K and of V, mean over layers."""
    found = torch.empty_like(kv)
    for row, (key, value) in zip(codec.encode(kv), found, strict=True):
        codec.decode(row, kv.shape[2], key, value)
    exact = kv.float().flatten(2)
    ratio: list[float] = ((found.float().flatten(2) - exact).norm(dim=2) / exact.norm(dim=2)).mean(0).tolist()
    return ratio
