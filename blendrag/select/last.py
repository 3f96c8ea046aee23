"""The selector by the attention of the prompt's last token, which the first token of the answer comes
from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from blendrag.choice import Reader, number, yes_or_no
from blendrag.select.interface import CachedTokens, RankedSelector, Selector, register_selector
from blendrag.select.static import StaticSelector


@register_selector("last")
class Last(StaticSelector, RankedSelector):
    """A selector of the top ``ratio`` by the last token's attention and a share of the whole question's."""

    reads_question = True
    arguments: ClassVar[Mapping[str, Reader]] = {
        **Selector.arguments,
        "question": number(),
        "prior": number(),
        "group": number(),
        "shift": yes_or_no,
    }

    def __init__(
        self,
        ratio: float,
        question: float = 0.0,
        prior: float = 0.5,
        group: float = 1,
        shift: bool = True,
        **others: Any,
    ) -> None:
        super().__init__(ratio, **others)
        self._question, self._prior, self._group, self.shifts = question, prior, int(group), shift

    def rank(self, tokens: CachedTokens) -> torch.Tensor:
        assert tokens.attention is not None and tokens.last is not None and tokens.runs is not None
        scores = tokens.last / tokens.last.sum() + self._question * tokens.attention / tokens.attention.sum()
        scores = scores / (1.0 + tokens.runs) ** self._prior
        of = torch.arange(len(scores)) // self._group
        return torch.zeros(len(scores)).index_add_(0, of, scores)[of]
