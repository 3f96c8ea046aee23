"""From a selector's name to one that is made for a request."""

from __future__ import annotations

from blendrag.errors import ConfigError
from blendrag.options import BlendOptions
from blendrag.select import gradual, gradual_query, hkvd, query, static  # noqa: F401  (they register)
from blendrag.select.interface import SELECTORS, Selector
from blendrag.select.union import Union


def make_selector(options: BlendOptions) -> Selector:
    """The selector that the options name, or the union of two: ``a+b``. Ratios 0 and 1 leave no choice, so
    none is measured.

    Raises ConfigError for a name that is not registered, or two that cannot share a budget.
    """
    parts = [part.strip() for part in options.selector.split("+")]
    for part in parts:
        if part not in SELECTORS:
            known = ", ".join(sorted(SELECTORS))
            raise ConfigError(f"unknown selector {part!r}; there are {known}, and unions of two: a+b")
    union = Union.of([SELECTORS[part] for part in parts], options) if len(parts) > 1 else None
    if options.recompute_ratio == 0.0:
        return SELECTORS["none"](options)
    if options.recompute_ratio == 1.0 and options.threshold is None:
        return SELECTORS["all"](options)
    return union or SELECTORS[options.selector](options)
