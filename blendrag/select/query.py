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


@register_selector("query")
class Query(StaticSelector, RankedSelector):
    """A selector of the top ``ratio`` of the cached tokens by the question's attention to them.

    shift: whether the other tokens move with those near them that are recomputed.
    """

    reads_question = True
    arguments: ClassVar[Mapping[str, Reader]] = {**Selector.arguments, "shift": yes_or_no}

    def __init__(self, ratio: float, shift: bool = True, **others: Any) -> None:
        super().__init__(ratio, **others)
        self.shifts = shift

    def rank(self, tokens: CachedTokens) -> torch.Tensor:
        assert tokens.attention is not None, "a selector that reads the question is given its attention"
        return tokens.attention
