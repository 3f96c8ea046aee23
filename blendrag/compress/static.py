"""Scores that read nothing of what is in a layer: what every other one must beat."""

from __future__ import annotations

import torch

from blendrag.compress.scorer import Observed, Scorer, register_scorer

_SINKS = 4


@register_scorer("recent")
class Recent(Scorer):
    """StreamingLLM: the first 4 tokens, then the latest ones."""

    def score(self, layer: Observed) -> torch.Tensor:
        scores = torch.arange(1.0, layer.candidates + 1, device=layer.key.device)
        scores[:_SINKS] += layer.candidates
        return scores.expand(layer.key.shape[1], -1)


@register_scorer("random")
class RandomScores(Scorer):
    """The same tokens for the same prompt, of each layer's heads their own."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def score(self, layer: Observed) -> torch.Tensor:
        shape = (layer.key.shape[1], layer.candidates)
        return torch.rand(shape, generator=self._generator).to(layer.key.device)
