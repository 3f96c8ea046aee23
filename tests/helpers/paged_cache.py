"""A paged KV cache, as engines on GPUs have it."""

from __future__ import annotations

import torch

from blendrag.attention.paged import PagedRows
from device import DEVICE


class Cache:
    """Sequences of random keys and values in blocks in random order. All else is NaN: reading it shows."""

    def __init__(
        self,
        lengths: list[int],
        kv_heads: int,
        size: int,
        block_size: int,
        layout: str,
        seed: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-length // block_size) for length in lengths]
        order = torch.randperm(sum(counts) + 2, generator=generator)
        self.table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        shape = [order.numel(), kv_heads, block_size, 2 * size]
        if layout == "NHD":
            memory = torch.full([shape[0], shape[2], shape[1], shape[3]], torch.nan).transpose(1, 2)
        else:
            memory = torch.full(shape, torch.nan)
        memory = memory.to(DEVICE, dtype)
        self.key, self.value = memory.transpose(1, 2).split(size, -1)
        self.whole = []
        for line, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            blocks, order = order[:count], order[count:]
            self.table[line, :count] = blocks
            at = torch.arange(length)
            key_value = torch.randn(2, length, kv_heads, size, generator=generator).to(dtype)
            for cache, tensor in zip((self.key, self.value), key_value, strict=True):
                cache[blocks[at // block_size], at % block_size] = tensor.to(DEVICE)
            self.whole.append(key_value)

    def rows(self, positions: torch.Tensor, sequences: torch.Tensor) -> PagedRows:
        return PagedRows(*(each.int().to(DEVICE) for each in (positions, sequences, self.table)))
