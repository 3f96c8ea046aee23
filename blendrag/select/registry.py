"""The registry of selectors: from a name to a selector that is made for a request."""

from __future__ import annotations

from blendrag.choice import Choice
from blendrag.errors import ConfigError
from blendrag.options import BlendOptions
from blendrag.select import gradual, hkvd, query, static  # noqa: F401  (they register)
from blendrag.select.interface import SELECTORS, Selector


def make_selector(options: BlendOptions) -> Selector:
    """Return the selector that the options name. Ratios 0 and 1 leave no choice, so none is measured.

    Raises ConfigError for a name that is not registered, and for arguments that the selector does not have,
    or cannot use.
    """
    choice, ratio = Choice.read(options.selector), options.recompute_ratio
    wanted = SELECTORS[choice.name]
    if choice.words:
        raise ConfigError(f"selector {options.selector!r}: {choice.words[0]!r} is no argument with a value")
    (arguments,) = choice.read_arguments("selector", wanted.arguments)
    selector = wanted(ratio, **arguments)
    if ratio == 0.0:
        return SELECTORS["none"](ratio, selector.auto_ratio)
    if ratio == 1.0 and not selector.only_cap:
        return SELECTORS["all"](ratio, selector.auto_ratio)
    return selector
