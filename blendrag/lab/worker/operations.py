"""What the laboratory's operations give back. It crosses as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """Relative errors that are small, or exactly 0, when blending works for a model.

    layer0_deviation: K and V of layer 0 depend on the token alone, so a chunk prefilled alone must equal the
        same tokens behind others.
    deeper_deviation: the same at the last layer: what blending has to repair (above 0 unless the check is
        blind).
    mask_error: attention of scattered tokens against a dense float32 reference.
    layers: how they are run. attention: what it has in some of them besides the causal mask.
    """

    layers: Literal["piece by piece", "whole"]
    attention: tuple[str, ...]
    layer0_deviation: float
    deeper_deviation: float
    mask_error: float


OBSERVED = 32  # queries of a prompt that choose what is kept, in a study of layers
MEASURED = "it was measured instead"


@dataclass(frozen=True, slots=True)
class LayerLoss:
    """What a choice keeps of the attention of an answer's tokens, and how far it moves what attention puts
    out (L1, relative to its norm), by layer; means over tokens. budget: as it is written."""

    budget: str
    kept: list[float]
    lost: list[float]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What the arithmetic of a layer needs. rows: tokens that are computed, in ``runs`` of consecutive ones;
    cached: whose KV is stored. pairs: of a query and a key it may see, of these rows and of all tokens.
    hidden, query, kv, intermediate: numbers in a token's residual stream, query, key, and MLP; itemsize:
    bytes of one."""

    layers: int
    tokens: int
    cached: int
    rows: int
    runs: int
    pairs_rows: int
    pairs_all: int
    hidden: int
    query: int
    kv: int
    intermediate: int
    itemsize: int


@dataclass(frozen=True, slots=True)
class PieceTimes:
    """Milliseconds, as often as was asked for. ms: by piece. matmul: of two square matrices, by their rows.
    copy: by bytes copied."""

    shape: LayerShape
    ms: dict[str, list[float]]
    matmul: dict[str, list[float]]
    copy: dict[str, list[float]]

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Self:
        return cls(**{**plain, "shape": LayerShape(**plain["shape"])})
