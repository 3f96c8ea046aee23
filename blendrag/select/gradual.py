"""The selector with gradual filtering: each check layer keeps fewer (CacheBlend section 4.3, Figure 9)."""

from __future__ import annotations

from typing import Any

from blendrag.select.hkvd import HKVD
from blendrag.select.interface import register_selector

# Deviations of neighbouring layers are correlated but not equal, so the first choice is generous and later
# ones correct it. The paper names no constants; these layers, and shares of 2 : 3/2 : 1 : 2/3 and so on,
# gave the lowest divergence of the schedules tried.
_LAYERS = (1, 4, 8, 16)


@register_selector("gradual")
class Gradual(HKVD):
    """A selector that applies HKVD several times, with falling shares whose mean over layers is ``ratio``."""

    def __init__(self, ratio: float, check_layers: tuple[int, ...] = _LAYERS, **others: Any) -> None:
        super().__init__(ratio, check_layers=check_layers, **others)
        self._shares: dict[int, float] = {}

    def check_layers(self, num_layers: int) -> tuple[int, ...]:
        layers = super().check_layers(num_layers)
        self._shares = schedule(layers, self.ratio, num_layers)
        return layers

    def share(self, layer: int) -> float:
        return self._shares[layer]


def schedule(layers: tuple[int, ...], ratio: float, num_layers: int) -> dict[int, float]:
    """Return falling shares, at most 1, per check layer: ``ratio`` is their mean over layers they rule."""
    ends = (*layers[1:], num_layers)
    spans = [end - start for start, end in zip(layers, ends, strict=True)]
    factors = [2.0, *(1.5 * (2 / 3) ** later for later in range(len(layers) - 1))]
    free, left = set(range(len(layers))), ratio * sum(spans)
    while free:  # a capped share leaves its surplus to the others
        scale = left / sum(factors[i] * spans[i] for i in free)
        capped = {i for i in free if factors[i] * scale > 1.0}
        if not capped:
            break
        free -= capped
        left -= sum(spans[i] for i in capped)
    return {layer: min(1.0, factor * scale) for layer, factor in zip(layers, factors, strict=True)}
