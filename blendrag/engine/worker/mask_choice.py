"""Which of the two exact masks a device is faster with (design decision D7): measured once, at the start."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from blendrag.attention.dense import masked_attention
from blendrag.attention.runs import find_runs
from blendrag.engine import compat
from blendrag.engine.worker.decoder import Decoder
from blendrag.engine.worker.paged import Addresses, PagedCache, Pages

Mask = Literal["runs", "dense"]

_TOKENS, _RATIO, _REPEATS = 3072, 0.15, 7
# Runs need no copy of K and V, and round as the engine does: the other way has to earn its place.
_MARGIN = 0.75


def choose_mask(decoder: Decoder, cache: PagedCache) -> tuple[Mask, dict[str, float]]:
    """The faster mask for this model and device, and what one layer took either way, in milliseconds."""
    if not all(compat.plain_attention(attention) for attention in decoder.attentions):
        return "runs", {}
    times = measure(decoder, cache)
    return ("dense" if times["dense"] < _MARGIN * times["runs"] else "runs"), times


@dataclass(frozen=True, slots=True)
class Probe:
    """Random scattered queries over random K and V, the same in a paged cache and as plain tensors."""

    pages: Pages
    addresses: Addresses
    positions: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float

    def runs(self) -> torch.Tensor:
        """Attention over the paged cache, runs as pseudo-requests."""
        return self.pages.attend(0, self.query, self.addresses)

    def dense(self) -> torch.Tensor:
        """Attention over the plain tensors, the mask written out."""
        return masked_attention(self.query, self.key, self.value, self.positions, self.scale)


def make_probe(decoder: Decoder, cache: PagedCache, tokens: int, share: float) -> Probe:
    """``share`` of ``tokens`` positions, the same ones every time."""
    attention, device, pages = decoder.attentions[0], cache.device, cache.scratch([tokens])
    dtype = next(decoder.model.parameters()).dtype
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    key, value = (random(tokens, *decoder.kv_shape) for _ in range(2))
    pages.write(0, pages.places(torch.arange(tokens, device=device)), key, value)
    at = torch.randperm(tokens, generator=generator)[: int(tokens * share)].sort().values.to(device)
    query = random(at.numel(), attention.num_heads, attention.head_size)
    return Probe(pages, pages.addresses(find_runs(at), at), at, query, key, value, attention.impl.scale)


@torch.inference_mode()
def measure(decoder: Decoder, cache: PagedCache) -> dict[str, float]:
    """Milliseconds of one layer's attention, either way, over random scattered positions.

    The least of several, taken in turns: what else the machine does can only add.
    """
    probe = make_probe(decoder, cache, _TOKENS, _RATIO)
    ways: dict[str, Callable[[], Any]] = {"runs": probe.runs, "dense": probe.dense}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_REPEATS):
        for name, work in ways.items():
            times[name].append(_milliseconds(work, cache.device))
    return {name: min(taken) for name, taken in times.items()}


def _milliseconds(work: Callable[[], Any], device: torch.device) -> float:
    begin = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return 1e3 * (time.perf_counter() - begin)
