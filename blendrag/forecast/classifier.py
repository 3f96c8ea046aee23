"""The trained part of the predictor: an MLP in numpy, so that using it needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]

UNITS = 128  # LPC section 3.2
LAYERS = 3
# No set of conversations shows that something is surer than this, and eviction takes it at its word.
_SUREST = 7.0
_FARTHEST = 10.0  # standard deviations: what lies beyond was not trained on


@dataclass(frozen=True, slots=True, eq=False)
class Classifier:
    """Linear layers with ReLU between them, on standardised columns.

    columns: [used], which of a row's numbers are read. mean, scale: [used]. layers: weight [out, in] and
    bias [out] of each, the last with one output: the logit.
    """

    columns: npt.NDArray[np.int64]
    mean: Array
    scale: Array
    layers: tuple[tuple[Array, Array], ...]

    def logits(self, rows: Array) -> Floats:
        """[n] from [n, width]: the log odds that the conversation goes on."""
        hidden = np.clip((rows[:, self.columns] - self.mean) / self.scale, -_FARTHEST, _FARTHEST)
        for number, (weight, bias) in enumerate(self.layers):
            hidden = (np.maximum(hidden, 0.0) if number else hidden) @ weight.T + bias
        return np.clip(hidden[:, 0].astype(np.float64), -_SUREST, _SUREST)

    def probability(self, rows: Array) -> Floats:
        """[n]: the chance that the conversation goes on."""
        return sigmoid(self.logits(rows))


def sigmoid(logits: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-logits))


def shapes(used: int) -> Sequence[tuple[tuple[int, int], tuple[int]]]:
    """Of weight and bias of each layer, for ``used`` columns."""
    widths = [used, *[UNITS] * (LAYERS - 1), 1]
    return [((out, into), (out,)) for into, out in pairwise(widths)]
