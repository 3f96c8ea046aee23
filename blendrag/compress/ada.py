"""Adaptive budgets (Ada-KV Algorithm 2): the pages that gain most are kept, whichever head's they are."""

from __future__ import annotations

import torch

from blendrag.compress.allocator import Allocator, register_allocator
from blendrag.compress.pages import largest_remainder


@register_allocator("ada")
class Ada(Allocator):
    """An allocator with equal layers, whose heads share a layer's pages by what their pages gain."""

    def allocate(self, gains: torch.Tensor, pages: int) -> torch.Tensor:
        total = pages * gains.shape[1]
        return torch.stack([adaptive(layer, total, self.alpha) for layer in gains])


def adaptive(gains: torch.Tensor, total: int, alpha: float) -> torch.Tensor:
    """Share ``total`` pages among heads with these gains, [heads, most]. Returns [heads] int64.

    A head's gains fall, so the largest ones are the best choice that there is, and what each head has of them
    is its first pages. A share ``alpha`` of them is given out evenly instead.
    """
    heads, most = gains.shape
    order = torch.sort(gains.cpu().flatten(), descending=True, stable=True).indices[:total]
    counts = torch.bincount(order // most, minlength=heads)
    return largest_remainder(counts * (1 - alpha) + total / heads * alpha, total)
