"""How scattered tokens are masked (design decision D7). A CPU has two exact ways: the start measures both."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from blendrag.attention.dense import masked_attention
from blendrag.attention.scores import Scores
from blendrag.engine.compat.model import scores_of
from blendrag.engine.worker.decoder import Decoder
from blendrag.engine.worker.indices import Ints
from blendrag.engine.worker.paged import Addresses, PagedCache, Pages

Mask = Literal["runs", "dense", "kernel"]

_TOKENS, _RATIO, _REPEATS = 3072, 0.15, 7
# Runs need no copy of K and V, and round as the engine does: the other way has to earn its place.
_MARGIN = 0.75


def choose_mask(decoder: Decoder, cache: PagedCache, wanted: Mask | Literal["auto"]) -> Mask:
    """The one that is wanted, or the faster one, of those that this model and device have."""
    if cache.by_kernel:
        return "kernel"
    scores = [scores_of(attention) for attention in decoder.attentions]
    if scores[0] is None or not all(each is not None and each.bare for each in scores):
        return "runs"
    if wanted != "auto":
        return wanted
    times = measure(make_probe(decoder, cache, _TOKENS, _RATIO), scores[0])
    return "dense" if times["dense"] < _MARGIN * times["runs"] else "runs"


@dataclass(frozen=True, slots=True)
class Probe:
    """Random scattered queries over random K and V, the same in a paged cache and as plain tensors."""

    pages: Pages
    addresses: Addresses
    positions: Ints
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def paged(self, layer: int) -> torch.Tensor:
        """Attention over the paged cache, as this layer does it."""
        return self.pages.attend(layer, self.query, self.addresses)

    def dense(self, scores: Scores) -> torch.Tensor:
        """Attention over the plain tensors, the mask written out."""
        return masked_attention(self.query, self.key, self.value, self.positions, scores)


def make_probe(decoder: Decoder, cache: PagedCache, tokens: int, share: float) -> Probe:
    """``share`` of ``tokens`` positions, the same ones every time."""
    attention, device, pages = decoder.attentions[0], cache.device, cache.scratch([tokens])
    dtype = next(decoder.model.parameters()).dtype
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    key, value = (random(tokens, *decoder.kv_shape) for _ in range(2))
    pages.write(0, pages.places(np.arange(tokens)), key, value)
    at: Ints = torch.randperm(tokens, generator=generator)[: int(tokens * share)].sort().values.numpy()
    query = random(at.size, attention.num_heads, attention.head_size)
    return Probe(pages, pages.addresses(at), at, query, key, value)


@torch.inference_mode()
def measure(probe: Probe, scores: Scores) -> dict[str, float]:
    """Milliseconds of the first layer's attention, either way: the least of several, taken in turns, as what
    else the machine does can only add."""
    ways: dict[str, Callable[[], Any]] = {
        "runs": lambda: probe.paged(0),
        "dense": lambda: probe.dense(scores),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_REPEATS):
        for name, work in ways.items():
            begin = time.perf_counter()
            work()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: min(taken) for name, taken in times.items()}
