"""Budgets that fall with depth (PyramidKV): lower layers attend to more."""

from __future__ import annotations

import torch

from blendrag.compress.ada import adaptive
from blendrag.compress.allocator import Allocator, register_allocator
from blendrag.compress.pages import largest_remainder

_BETA = 20  # the mean of all layers is so many times what the last layer has


@register_allocator("pyramid")
class Pyramid(Allocator):
    """An allocator that gives all heads of a layer the same."""

    def allocate(self, gains: torch.Tensor, pages: int) -> torch.Tensor:
        layers = layer_totals(gains, pages).tolist()
        return torch.stack([self._of_layer(gain, total) for gain, total in zip(gains, layers, strict=True)])

    def _of_layer(self, gains: torch.Tensor, total: int) -> torch.Tensor:
        return adaptive(gains, total, 1.0)


@register_allocator("ada_pyramid")
class AdaPyramid(Pyramid):
    """An allocator whose heads share a layer's pages by what their pages gain: Ada-Pyramid."""

    def _of_layer(self, gains: torch.Tensor, total: int) -> torch.Tensor:
        return adaptive(gains, total, self.alpha)


def layer_totals(gains: torch.Tensor, pages: int) -> torch.Tensor:
    """Return the pages of each layer, [layers] int64: along a line from nearly twice the mean down to a
    ``_BETA``th of it; less steep where the first would have more than there are, or the last less than it has
    to keep."""
    layers, heads, most = gains.shape
    least = int(gains.isinf().sum(-1).max())
    steep = min(pages - pages / _BETA, most - pages, pages - least)
    line = (
        torch.linspace(steep, -steep, layers, dtype=torch.float64) if layers > 1 else torch.zeros(1).double()
    )
    return largest_remainder((pages + line) * heads, pages * layers * heads)
