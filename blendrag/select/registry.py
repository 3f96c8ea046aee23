"""From a selector's name to one that is made for a request."""

from __future__ import annotations

from blendrag.errors import ConfigError
from blendrag.options import BlendOptions
from blendrag.select import gradual, hkvd, query, static  # noqa: F401  (they register)
from blendrag.select.interface import SELECTORS, Selector

_GONE = ("gradual_query", "weighted")


def make_selector(options: BlendOptions) -> Selector:
    """The selector that the options name. Ratios 0 and 1 leave no choice, so none is measured.

    Raises ConfigError for a name that is not registered, with the remedy for one that was.
    """
    name = options.selector
    if name in _GONE:
        raise ConfigError(f"the selector {name} is gone: use query")
    selector = SELECTORS[name]
    if options.recompute_ratio == 0.0:
        selector = SELECTORS["none"]
    elif options.recompute_ratio == 1.0 and options.threshold is None:
        selector = SELECTORS["all"]
    return selector(options)
