"""The trained part of LPC's predictor: an MLP in numpy, so that using it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from blendrag.errors import PredictorError
from blendrag.eviction.hazard import Floats

Array = npt.NDArray[np.float32]

# No set of conversations shows that something is surer than this, and eviction trusts it fully.
_SUREST = 7.0
_FARTHEST = 10.0  # standard deviations: farther values were not trained on


@dataclass(frozen=True, slots=True, eq=False)
class Classifier:
    """A classifier of linear layers with ReLU between them, on standardised columns.

    mean, scale: [width]. layers: weight [out, in] and bias [out] of each, the last with one output: the
    logit.
    """

    mean: Array
    scale: Array
    layers: tuple[tuple[Array, Array], ...]

    def logits(self, rows: Array) -> Floats:
        """Return [n] from [n, width]: the log odds that the conversation goes on. Raises PredictorError for
        rows of another width."""
        if rows.shape[1] != len(self.mean):
            raise PredictorError(
                f"the embedder makes rows of {rows.shape[1]} numbers, and the predictor was fitted to"
                f" {len(self.mean)}: fit it again"
            )
        hidden = np.clip((rows - self.mean) / self.scale, -_FARTHEST, _FARTHEST)
        for number, (weight, bias) in enumerate(self.layers):
            hidden = (np.maximum(hidden, 0.0) if number else hidden) @ weight.T + bias
        return np.clip(hidden[:, 0].astype(np.float64), -_SUREST, _SUREST)

    def probability(self, rows: Array) -> Floats:
        """Return [n] from [n, width]: the chance that the conversation goes on."""
        return 1.0 / (1.0 + np.exp(-self.logits(rows)))
