"""The selector axis: which cached tokens are recomputed. One interface, one registry."""

from blendrag.select.interface import (
    SELECTORS,
    CachedTokens,
    Metric,
    RankedSelector,
    Selector,
    register_selector,
)
from blendrag.select.registry import make_selector

__all__ = [
    "SELECTORS",
    "CachedTokens",
    "Metric",
    "RankedSelector",
    "Selector",
    "make_selector",
    "register_selector",
]
