"""Selectors that decide before anything is computed, so that no layer runs over all tokens."""

from __future__ import annotations

import torch

from blendrag.select.interface import CachedTokens, RankedSelector, Selector, register_selector


class StaticSelector(Selector):
    """The base of selectors that decide at layer 0."""

    reads_deviation = None

    def check_layers(self, num_layers: int) -> tuple[int, ...]:
        return (0,)


@register_selector("all")
class All(StaticSelector):
    """A selector of every token: full prefill through the fused path. The upper boundary."""

    def select(self, layer: int, tokens: CachedTokens) -> torch.Tensor:
        return torch.arange(tokens.offsets.numel())


@register_selector("none")
class NoTokens(StaticSelector):
    """A selector of no token: full KV reuse (PromptCache with positions recovered). The lower boundary."""

    def select(self, layer: int, tokens: CachedTokens) -> torch.Tensor:
        return tokens.offsets.new_empty(0)


@register_selector("first_k")
class FirstK(StaticSelector):
    """A selector of the first ``ratio`` of every chunk: tokens that were attention sinks when the chunk was
    alone (EPIC, LegoLink).

    Rounded up in every chunk, so that none goes without.
    """

    def select(self, layer: int, tokens: CachedTokens) -> torch.Tensor:
        # 0.36 * 75 is slightly more than 27 in floating point
        head = torch.ceil(tokens.lengths.double() * self.ratio - 1e-9)
        return torch.nonzero(tokens.offsets < head, as_tuple=True)[0]


@register_selector("random")
class RandomTokens(StaticSelector, RankedSelector):
    """A selector of random tokens, the same every time: the control that every selector must beat."""

    def rank(self, tokens: CachedTokens) -> torch.Tensor:
        n = tokens.offsets.numel()
        order = torch.randperm(n, generator=torch.Generator().manual_seed(n))
        return order.to(torch.float32)
