"""The selector by the attention of the prompt's last token, which the answer's first one comes from, and of
the question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from blendrag.choice import Reader, number, yes_or_no
from blendrag.select.interface import CachedTokens, RankedSelector, Selector, register_selector
from blendrag.select.static import StaticSelector


@register_selector("last")
class Last(StaticSelector, RankedSelector):
    """A selector of the top ``ratio`` by the attention of the prompt's last token and of the whole question,
    in equal shares. The first decides the answer's first token, the second its later ones.

    Tokens at the beginning of a document count for more, since they deviate most: they were the first of
    what they were prefilled with.

    question: the weight of the whole question, where the last token has 1. shift: whether the other tokens
    move with those near them that are recomputed.
    """

    reads_question = True
    arguments: ClassVar[Mapping[str, Reader]] = {
        **Selector.arguments,
        "question": number(),
        "shift": yes_or_no,
    }

    def __init__(self, ratio: float, question: float = 1.0, shift: bool = True, **others: Any) -> None:
        super().__init__(ratio, **others)
        self._question, self.shifts = question, shift

    def rank(self, tokens: CachedTokens) -> torch.Tensor:
        attention, last, runs = tokens.attention, tokens.last, tokens.runs
        assert attention is not None and last is not None and runs is not None, "it reads the question"
        scores = _share(last) + self._question * _share(attention)
        return scores / (1.0 + runs).sqrt()


def _share(attention: torch.Tensor) -> torch.Tensor:
    return attention / attention.sum().clamp_min(1e-30)
