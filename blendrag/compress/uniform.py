"""The same for every head: SnapKV, and the baseline of Ada-KV's Theorem 4."""

from __future__ import annotations

import torch

from blendrag.compress.allocator import Allocator, register_allocator


@register_allocator("uniform")
class Uniform(Allocator):
    """The same for every head of every layer."""

    def allocate(self, gains: torch.Tensor, pages: int) -> torch.Tensor:
        return torch.full(gains.shape[:2], pages, dtype=torch.int64)
