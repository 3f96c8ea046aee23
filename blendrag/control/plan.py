"""What the controller would choose for a corpus, tier by tier: ``blendrag plan``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from blendrag.control.choose import ChunkCost, Controller, Decision, TierChoice, cheapest_tier, ratio_for
from blendrag.control.estimate import Estimator
from blendrag.control.prices import Prices, per_month
from blendrag.store.identity import KVIdentity
from blendrag.store.record import Head, Layout

FRESH_TOKENS = 64  # of a prompt around its chunks: system prompt, separators, a question


def record_bytes(identity: KVIdentity, dtype: str, tokens: int) -> int:
    """Bytes of the record of a chunk of ``tokens`` tokens, in the identity's codec."""
    layout = Layout(identity, dtype)
    ids, checksums = np.zeros(tokens, dtype="<i4"), ("0" * 16,) * layout.num_layers
    return Head(layout, "0" * 32, ids, checksums).nbytes


@dataclass(frozen=True, slots=True)
class Corpus:
    """chunks: in the whole corpus, of chunk_tokens tokens and chunk_bytes bytes of KV each.
    top_k: chunks in a prompt. fresh_tokens: its other tokens."""

    chunks: int
    chunk_tokens: int
    chunk_bytes: int
    top_k: int
    fresh_tokens: int = FRESH_TOKENS


@dataclass(frozen=True, slots=True)
class TierPlan:
    """A tier that holds the whole corpus. cost: a month's; None if there is no price. Times of one prompt.

    ratio: by mode A. auto: mode C with mode A's ratio; fixed: with the ratio that was asked for.
    """

    tier: str
    cost: float | None
    load_s: float
    recompute_s: float
    ttft_s: float
    ratio: float
    auto: Decision
    fixed: Decision


@dataclass(frozen=True, slots=True)
class Plan:
    """``plain_s``: time to the first token by plain prefill. ``nbytes``: KV of the corpus."""

    corpus: Corpus
    ratio: float
    nbytes: int
    plain_s: float
    tiers: tuple[TierPlan, ...]
    choice: TierChoice

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def make_plan(estimate: Estimator, corpus: Corpus, ratio: float, prices: Prices) -> Plan:
    """``ratio``: for mode B and the times in the table; mode A does not go below it."""
    cached, fresh = corpus.top_k * corpus.chunk_tokens, corpus.fresh_tokens
    nbytes = corpus.chunks * corpus.chunk_bytes
    rates: Mapping[str, float | None] = {tier: prices.of(tier) for tier in estimate.tiers}
    recompute = estimate.recompute_s(cached, fresh, ratio)
    controller = Controller(estimate, ratio)  # as the engine has it
    tiers = []
    for tier, rate in rates.items():
        load = estimate.load_s(corpus.top_k * corpus.chunk_bytes, tier)
        costs = [ChunkCost(corpus.chunk_tokens, corpus.chunk_bytes, tier)] * corpus.top_k
        tiers.append(
            TierPlan(
                tier,
                None if rate is None else per_month(nbytes, rate),
                load,
                recompute,
                estimate.blend_s(load, recompute, ratio),
                ratio_for(estimate, load, cached, fresh, controller.least_ratio),
                controller.decide(costs, fresh, None),
                controller.decide(costs, fresh, ratio),
            )
        )
    priced = {tier: rate for tier, rate in rates.items() if rate is not None}
    choice = cheapest_tier(estimate, priced, corpus.top_k * corpus.chunk_bytes, cached, fresh, ratio)
    return Plan(corpus, ratio, nbytes, estimate.prefill_s(0, cached + fresh), tuple(tiers), choice)
