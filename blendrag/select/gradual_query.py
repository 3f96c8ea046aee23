"""Gradual filtering by the attention still to come: what the question will read is worth repairing.

A stored token does harm where it is wrong and attended to. The first pass over reused KV tells how much
attention the question pays to it in every layer; at a check layer, only the layers from there on count.
"""

from __future__ import annotations

import torch

from blendrag.select.gradual import Gradual
from blendrag.select.hkvd import HKVD
from blendrag.select.interface import CachedTokens, register_selector


@register_selector("gradual_query")
class GradualQuery(Gradual):
    """By that attention alone, from layer 0 on: no layer runs over all tokens."""

    reads_question = True
    reads_deviation = False
    layers = (0, 4, 8, 16)

    def rank(self, tokens: CachedTokens) -> torch.Tensor:
        return attention_to_come(tokens)


@register_selector("weighted")
class Weighted(Gradual, HKVD):
    """By that attention times the deviation: the two factors of the error in what the question attends to.

    Deviation is measured at one layer and differs from that of later ones, so it counts by its length only
    (the root of the squared L2 distance).
    """

    reads_question = True

    def rank(self, tokens: CachedTokens) -> torch.Tensor:
        deviation = super().rank(tokens)
        scores = deviation.clamp_min(0).sqrt() * attention_to_come(tokens)
        return scores.masked_fill(deviation.isinf(), float("-inf"))  # below the threshold


def attention_to_come(tokens: CachedTokens) -> torch.Tensor:
    """[n] float32: the question's, in this layer and those above it."""
    assert tokens.attention is not None, "a selector that reads the question is given its attention"
    return tokens.attention[tokens.layer :].sum(0)
