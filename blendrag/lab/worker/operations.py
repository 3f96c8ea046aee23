"""Results of the laboratory's operations. They cross as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """Relative errors that are small, or exactly 0, when blending works for a model.

    layer0_deviation: K and V of layer 0 depend on the token alone, so a chunk prefilled alone must equal the
        same tokens behind others.
    deeper_deviation: the same at the last layer: what blending has to repair (above 0 unless the check is
        blind).
    mask_error: attention of scattered tokens against a dense float32 reference.
    layers: how they are run. attention: what it has in some of them besides the causal mask. scattered: what
        attends for scattered tokens.
    """

    layers: Literal["piece by piece", "whole"]
    attention: tuple[str, ...]
    scattered: str
    layer0_deviation: float
    deeper_deviation: float
    mask_error: float
