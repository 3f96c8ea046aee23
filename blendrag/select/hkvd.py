"""The selector HKVD: recompute what deviates most from full prefill (CacheBlend section 4.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from blendrag.choice import Reader, layers, number, one_of
from blendrag.select.interface import CachedTokens, Metric, RankedSelector, Selector, register_selector


@register_selector("hkvd")
class HKVD(RankedSelector):
    """A selector of the top ``ratio`` of the cached tokens by deviation at the first check layer.

    metric: what is compared: V (the paper's released code), K (LMCache), or both.
    check_layers: where it is compared. With several, the same share is chosen again at each, among the
        survivors of the last: for shares that shrink with depth, see ``gradual``.
    threshold: squared deviation relative to the tokens' mean squared norm, up to which a token is left alone.
        The ratio then is the cap.
    """

    arguments: ClassVar[Mapping[str, Reader]] = {
        **Selector.arguments,
        "metric": one_of("v", "k", "kv"),
        "check_layers": layers,
        "threshold": number(),
    }

    def __init__(
        self,
        ratio: float,
        metric: Metric = "v",
        check_layers: tuple[int, ...] = (1,),
        threshold: float | None = None,
        **others: Any,
    ) -> None:
        super().__init__(ratio, **others)
        self.reads_deviation, self.only_cap = metric, threshold is not None
        self._layers, self._threshold = check_layers, threshold

    def check_layers(self, num_layers: int) -> tuple[int, ...]:
        inside = tuple(layer for layer in self._layers if layer < num_layers)
        return inside or (num_layers - 1,)

    def rank(self, tokens: CachedTokens) -> torch.Tensor:
        deviation = tokens.deviation
        assert deviation is not None, "HKVD is asked after the check layer's projections"
        if self._threshold is None:
            return deviation
        return deviation.masked_fill(deviation <= self._threshold * tokens.norm, float("-inf"))
