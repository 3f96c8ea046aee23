"""HKVD: recompute the tokens whose K/V deviate most from what full prefill gives (CacheBlend section 4.3)."""

from __future__ import annotations

import torch

from blendrag.fuse.selector import CachedTokens, Selector, budget, register_selector


@register_selector("hkvd")
class HKVD(Selector):
    """The top ``ratio`` of the cached tokens by deviation at the first check layer.

    With several check layers the same share is chosen again at each, among the survivors of the last:
    for shares that shrink with depth, see ``gradual``.
    """

    def check_layers(self, num_layers: int) -> tuple[int, ...]:
        inside = tuple(layer for layer in self.options.check_layers if layer < num_layers)
        return inside or (num_layers - 1,)

    def share(self, layer: int) -> float:
        """Share of the request's cached tokens kept from ``layer`` on."""
        return self.options.ratio

    def select(self, layer: int, tokens: CachedTokens) -> torch.Tensor:
        assert tokens.deviation is not None, "HKVD is asked after the check layer's projections"
        return top_deviating(tokens, self.share(layer), self.options.threshold)


def top_deviating(tokens: CachedTokens, share: float, threshold: float | None) -> torch.Tensor:
    """Ascending indices of the most deviating tokens, at most ``share`` of the request's cached tokens.

    Under a threshold, only those whose deviation exceeds ``threshold`` times the mean squared norm.
    """
    deviation = tokens.deviation
    assert deviation is not None
    count = min(budget(tokens.total, share), deviation.numel())
    top = torch.topk(deviation, count).indices
    if threshold is not None:
        top = top[deviation[top] > threshold * tokens.norm]
    return torch.sort(top).values
