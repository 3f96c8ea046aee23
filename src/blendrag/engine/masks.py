"""Which of the two exact masks a device is faster with (design decision D7): measured once, at the start."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import torch

from blendrag.engine import compat
from blendrag.engine.decoder import Decoder
from blendrag.fuse.masked import masked_attention
from blendrag.fuse.runs import find_runs

Mask = Literal["runs", "dense"]

_TOKENS, _RATIO, _REPEATS = 3072, 0.15, 7
# Runs need no copy of K and V, and round as the engine does: the other way has to earn its place.
_MARGIN = 0.75


def choose_mask(decoder: Decoder, runner: Any, block_size: int) -> tuple[Mask, dict[str, float]]:
    """The faster mask for this model and device, and what one layer took either way, in milliseconds."""
    if not all(compat.plain_attention(attention) for attention in decoder.attentions):
        return "runs", {}
    times = measure(decoder, runner, block_size)
    return ("dense" if times["dense"] < _MARGIN * times["runs"] else "runs"), times


@torch.inference_mode()
def measure(decoder: Decoder, runner: Any, block_size: int) -> dict[str, float]:
    """Milliseconds of one layer's attention, either way, over random scattered positions.

    The least of several, taken in turns: what else the machine does can only add.
    """
    attention = decoder.attentions[0]
    cache = compat.scratch_cache(attention, -(-_TOKENS // block_size))
    device, dtype = cache.device, next(decoder.model.parameters()).dtype
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    key, value = (random(_TOKENS, *decoder.kv_shape) for _ in range(2))
    compat.write_kv(attention, key, value, cache, torch.arange(_TOKENS, device=device))
    rows = torch.randperm(_TOKENS, generator=generator)[: int(_TOKENS * _RATIO)].sort().values.to(device)
    query = random(rows.numel(), attention.num_heads, attention.head_size)
    table = torch.arange(cache.shape[0], dtype=torch.int32, device=device)[None]
    metadata = compat.attention_metadata(runner, find_runs(rows), table, rows)[attention.layer_name]
    ways: dict[str, Callable[[], Any]] = {
        "runs": lambda: compat.attend(attention, query, cache, metadata),
        "dense": lambda: masked_attention(query, key, value, rows, attention.impl.scale),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_REPEATS):
        for name, work in ways.items():
            times[name].append(_milliseconds(work, device))
    return {name: min(taken) for name, taken in times.items()}


def _milliseconds(work: Callable[[], Any], device: torch.device) -> float:
    begin = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return 1e3 * (time.perf_counter() - begin)
