"""Token selection, deviation and masks: plain torch, no engine, no storage."""

from blendrag.select.interface import (
    SELECTORS,
    CachedTokens,
    Selector,
    SelectorOptions,
    make_selector,
    register_selector,
)

__all__ = [
    "SELECTORS",
    "CachedTokens",
    "Selector",
    "SelectorOptions",
    "make_selector",
    "register_selector",
]
