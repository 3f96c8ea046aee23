"""The selector by question attention: recompute the tokens that the question looks at (ProphetKV, InfoFlow).

A first pass runs the question's tokens over reused KV. The attention they pay to each cached token tells
which of them will matter for the answer, before anything is recomputed.
"""

from __future__ import annotations

import torch

from blendrag.select.interface import CachedTokens, RankedSelector, register_selector
from blendrag.select.static import StaticSelector


@register_selector("query")
class Query(StaticSelector, RankedSelector):
    """A selector of the top ``ratio`` of the cached tokens by the question's attention to them."""

    reads_question = True

    def rank(self, tokens: CachedTokens) -> torch.Tensor:
        assert tokens.attention is not None, "a selector that reads the question is given its attention"
        return tokens.attention
