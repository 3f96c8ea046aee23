"""HKVD: recompute the tokens whose K/V deviate most from what full prefill gives (CacheBlend section 4.3)."""

from __future__ import annotations

import torch

from blendrag.select.interface import CachedTokens, RankedSelector, register_selector


@register_selector("hkvd")
class HKVD(RankedSelector):
    """The top ``ratio`` of the cached tokens by deviation at the first check layer.

    With several check layers the same share is chosen again at each, among the survivors of the last:
    for shares that shrink with depth, see ``gradual``. Under a threshold, only tokens are chosen whose
    deviation exceeds ``threshold`` times the mean squared norm.
    """

    def check_layers(self, num_layers: int) -> tuple[int, ...]:
        inside = tuple(layer for layer in self.options.check_layers if layer < num_layers)
        return inside or (num_layers - 1,)

    def rank(self, tokens: CachedTokens) -> torch.Tensor:
        deviation, threshold = tokens.deviation, self.options.threshold
        assert deviation is not None, "HKVD is asked after the check layer's projections"
        if threshold is None:
            return deviation
        return deviation.masked_fill(deviation <= threshold * tokens.norm, float("-inf"))
