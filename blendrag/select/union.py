"""Two selectors that share one budget: ``a+b``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from blendrag.errors import ConfigError
from blendrag.options import BlendOptions
from blendrag.select.interface import CachedTokens, RankedSelector, Selector, budget, indices

_NOBODY = -1


class Union(Selector):
    """The first selector's picks at half of the ratio, and for the rest of the budget the second's among what
    the first did not take.

    Each is asked at its own check layers; one that needs none is asked where the other begins, so that no
    token is dropped before both have chosen. What a selector picked stays until it is asked again.
    """

    def __init__(self, options: BlendOptions, first: RankedSelector, second: RankedSelector) -> None:
        super().__init__(options)
        self._parts = (first, second)
        self.reads_question = first.reads_question or second.reads_question
        self.reads_deviation = first.reads_deviation or second.reads_deviation
        self._own: tuple[tuple[int, ...], ...] = ()  # the parts' check layers
        self._asked: tuple[set[int], ...] = ()  # at which each part is asked here
        self._owners: torch.Tensor | None = None  # [survivors] int64, the part that picked each

    @classmethod
    def of(cls, kinds: Sequence[type[Selector]], options: BlendOptions) -> Union:
        """Of two different kinds that rank. Raises ConfigError for any others."""
        ranked = [kind for kind in kinds if issubclass(kind, RankedSelector)]
        if not len(kinds) == len(ranked) == len(set(kinds)) == 2:
            raise ConfigError(
                "a union (a+b) is of two different selectors that rank tokens, such as first_k+hkvd:"
                " all, none and unions have no rank"
            )
        half = replace(options, recompute_ratio=options.recompute_ratio / 2)
        first, second = (kind(half) for kind in ranked)
        first.most = second.most = 1.0 - half.recompute_ratio  # at no layer more than everything
        return cls(options, first, second)

    def check_layers(self, num_layers: int) -> tuple[int, ...]:
        self._own = tuple(part.check_layers(num_layers) for part in self._parts)
        begin = max(layers[0] for layers in self._own)
        self._asked = tuple({max(begin, layer) for layer in layers} for layers in self._own)
        return tuple(sorted(set.union(*self._asked)))

    def select(self, layer: int, tokens: CachedTokens) -> torch.Tensor:
        owners = self._owners
        if owners is None:
            owners = torch.full_like(tokens.offsets, _NOBODY)
        assert owners.numel() == tokens.offsets.numel(), "asked about other tokens than those that were left"
        asked = [number for number, layers in enumerate(self._asked) if layer in layers]
        for number in asked:
            owners = owners.masked_fill(owners == number, _NOBODY)
        shares = [self._share(number, layer) for number in range(len(self._parts))]
        whole = budget(tokens.total, min(1.0, sum(shares)))
        for number in asked:
            rest = whole - int((owners != _NOBODY).sum())
            count = rest if number == asked[-1] else min(rest, budget(tokens.total, shares[number]))
            free = indices(owners == _NOBODY)
            owners[free[self._parts[number].best(tokens.at(free), count)]] = number
        kept = indices(owners != _NOBODY)
        self._owners = owners[kept]
        return kept

    def _share(self, number: int, layer: int) -> float:
        """What a part was last asked for."""
        own = self._own[number]
        return self._parts[number].share(max(at for at in own if at <= layer))
