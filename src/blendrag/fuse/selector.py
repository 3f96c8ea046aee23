"""The selector axis: which cached tokens are recomputed. One interface, one registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from blendrag.errors import ConfigError

Metric = Literal["v", "k", "kv"]


@dataclass(frozen=True, slots=True)
class SelectorOptions:
    """What a selector may be told.

    ratio: share of the request's cached tokens that is recomputed, on average over the layers
        (CacheBlend section 7.2 uses 0.15).
    metric: what HKVD compares: V (the paper's released code), K (LMCache), or both.
    check_layers: layers at which deviation is measured (CacheBlend section 4.3).
    threshold: squared deviation relative to the tokens' mean squared norm below which a token is left
        alone; ``ratio`` then is the cap.
    """

    ratio: float = 0.15
    metric: Metric = "v"
    check_layers: tuple[int, ...] = (1,)
    threshold: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.ratio <= 1.0:
            raise ConfigError(f"recompute_ratio must be between 0 and 1, not {self.ratio}")
        if self.metric not in ("v", "k", "kv"):
            raise ConfigError(f"metric must be v, k or kv, not {self.metric!r}")


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """The cached tokens a selector chooses from: all of them at its first check layer, survivors later.

    offsets: [n] int64, place of each token inside its chunk.
    lengths: [n] int64, length of the chunk each token belongs to.
    total: cached tokens of the whole request; ratios refer to it.
    deviation: [n] float32, squared L2 distance between fresh and stored K/V at this layer;
        None at layer 0, before anything was computed.
    norm: mean squared L2 norm of the fresh K/V at this layer, the unit of ``threshold``.
    """

    offsets: torch.Tensor
    lengths: torch.Tensor
    total: int
    deviation: torch.Tensor | None = None
    norm: float = 1.0


class Selector(ABC):
    """Chooses which cached tokens stay in the computation.

    Asked once at each of its check layers, in ascending order; a token dropped once is never asked about
    again. A selector whose only check layer is 0 decides before anything is computed: the cheapest kind,
    since no layer runs over all tokens.
    """

    def __init__(self, options: SelectorOptions) -> None:
        self.options = options

    @abstractmethod
    def check_layers(self, num_layers: int) -> tuple[int, ...]:
        """Ascending layers at which :meth:`select` is asked, all below ``num_layers``."""

    @abstractmethod
    def select(self, layer: int, tokens: CachedTokens) -> torch.Tensor:
        """Ascending int64 indices into ``tokens`` of those that are recomputed from this layer on."""


SELECTORS: dict[str, type[Selector]] = {}


def register_selector(name: str) -> Callable[[type[Selector]], type[Selector]]:
    """Class decorator: make a selector available under ``name``."""

    def register(cls: type[Selector]) -> type[Selector]:
        SELECTORS[name] = cls
        return cls

    return register


def make_selector(name: str, options: SelectorOptions) -> Selector:
    """The selector called ``name``. Ratios 0 and 1 leave no choice, so none is measured."""
    from blendrag.fuse import gradual, hkvd, static  # noqa: F401  (they register themselves)

    if name not in SELECTORS:
        raise ConfigError(f"unknown selector {name!r}; there are {', '.join(sorted(SELECTORS))}")
    if options.ratio == 0.0:
        name = "none"
    elif options.ratio == 1.0 and options.threshold is None:
        name = "all"
    return SELECTORS[name](options)


def budget(total: int, ratio: float) -> int:
    """Tokens that ``ratio`` of ``total`` stands for; at least one when anything is asked for at all."""
    return min(total, max(1, round(total * ratio))) if total and ratio > 0 else 0


def indices(mask_or_items: Any) -> torch.Tensor:
    """Ascending int64 indices of a boolean mask."""
    return torch.nonzero(mask_or_items, as_tuple=True)[0]
