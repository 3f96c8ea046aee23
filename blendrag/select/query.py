"""The selector by question attention: recompute the tokens that the question looks at (ProphetKV, InfoFlow).

A first pass runs the question's tokens over reused KV. The attention they pay to each cached token tells
which of them will matter for the answer, before anything is recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from blendrag.choice import Reader, yes_or_no
from blendrag.select.interface import CachedTokens, RankedSelector, Selector, register_selector
from blendrag.select.static import StaticSelector

# Tokens of a chunk, the first of which deviate most: what they had before them is elsewhere in the prompt, or
# not in it. Chosen by the answer's divergence on pieces of 48 tokens and on whole paragraphs.
_SETTLED = 16.0


@register_selector("query")
class Query(StaticSelector, RankedSelector):
    """A selector of the top ``ratio`` of the cached tokens by the question's attention to them.

    prior: whether a token's attention counts for less the further it stands from the beginning of its chunk.
    shift: whether the other tokens move with those near them that are recomputed.
    """

    reads_question = True
    arguments: ClassVar[Mapping[str, Reader]] = {
        **Selector.arguments,
        "prior": yes_or_no,
        "shift": yes_or_no,
    }

    def __init__(self, ratio: float, prior: bool = True, shift: bool = True, **others: Any) -> None:
        super().__init__(ratio, **others)
        self._prior, self.shifts = prior, shift

    def rank(self, tokens: CachedTokens) -> torch.Tensor:
        mass = tokens.attention
        assert mass is not None, "a selector that reads the question is given its attention"
        return mass / (1 + tokens.offsets.to(mass) / _SETTLED).sqrt() if self._prior else mass
