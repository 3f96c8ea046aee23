"""The selectors, which choose the cached tokens to recompute: one interface, one registry."""

from blendrag.select.interface import (
    SELECTORS,
    CachedTokens,
    Metric,
    Selector,
    register_selector,
)
from blendrag.select.registry import make_selector

__all__ = [
    "SELECTORS",
    "CachedTokens",
    "Metric",
    "Selector",
    "make_selector",
    "register_selector",
]
