"""The trained part of the predictor: an MLP in numpy, so that using it needs no torch, and its files.

A folder holds weights in safetensors, and a manifest that says what they are for. The manifest names its
weights file, whose name holds its digest. It is written last and in one step, so that a process that looks
while another writes finds the old pair or the new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from blendrag.errors import PredictorError
from blendrag.eviction.hazard import Floats
from blendrag.forecast.features import VERSION
from blendrag.private import make_folder, write_whole

MANIFEST = "predictor.json"

Array = npt.NDArray[np.float32]

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
        return 1.0 / (1.0 + np.exp(-self.logits(rows)))


def shapes(used: int) -> Sequence[tuple[tuple[int, int], tuple[int]]]:
    """Of weight and bias of each layer, for ``used`` columns."""
    widths = [used, *[UNITS] * (LAYERS - 1), 1]
    return [((out, into), (out,)) for into, out in pairwise(widths)]


@dataclass(frozen=True, slots=True)
class ForecastQuality:
    """Of forecasts of a yes or no: as an order (auc: 0.5 where only one outcome occurs), as probabilities.

    log_loss: mean surprise, in nats. calibration_error: mean distance of forecast and truth over ten bins,
    weighted by their counts.
    """

    auc: float
    brier: float
    log_loss: float
    calibration_error: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """How good a predictor is on conversations. examples: their prompts; goes_on: share of these after which
    there was another."""

    conversations: int
    examples: int
    goes_on: float
    lpc: ForecastQuality


class Manifest(BaseModel):
    """What a predictor was made of. Times are ISO 8601, shares are of 1."""

    model_config = ConfigDict(frozen=True)

    version: int = Field(description="Of the rows that it reads: features.VERSION.")
    embedder: str
    width: int = Field(gt=0, description="Of its rows.")
    layout: Literal["apart"] = Field(description="Of its rows: features.LAYOUT.")
    scalars: tuple[str, ...] = Field(description="What it reads beside vectors.")
    source: str
    source_digest: str
    held_out: float = Field(ge=0, lt=1, description="Share of its conversations that was not trained on.")
    seed: int
    conversations: int
    examples: int
    metrics: Annotated[Metrics | None, BeforeValidator(lambda found: found or None)] = Field(
        description="On what was held out; None where nothing was."
    )
    made_at: str
    weights: str = Field(default="", pattern=r"^(predictor-[0-9a-f]{32}\.safetensors)?$")


def save_weights(folder: Path, classifier: Classifier, manifest: Manifest) -> Manifest:
    """Put a predictor in place of what is in ``folder``. Raises PredictorError."""
    tensors = {"columns": classifier.columns, "mean": classifier.mean, "scale": classifier.scale}
    for number, (weight, bias) in enumerate(classifier.layers):
        tensors |= {f"{number}.weight": weight, f"{number}.bias": bias}
    data = save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()})
    named = manifest.model_copy(update={"weights": _name(data)})
    try:
        make_folder(folder)
        write_whole(folder / named.weights, data)
        write_whole(folder / MANIFEST, (named.model_dump_json(indent=2) + "\n").encode())
        for old in folder.glob("predictor-*.safetensors"):
            if old.name != named.weights:
                old.unlink()
    except OSError as error:
        raise PredictorError(f"cannot write a predictor to {str(folder)!r}: {error.strerror}") from error
    return named


def load_manifest(folder: Path) -> Manifest:
    """Raises PredictorError if there is none, or none that this version reads."""
    path = folder / MANIFEST
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise PredictorError(f"no predictor in {str(folder)!r}: blendrag evictor train makes one") from None
    except OSError as error:
        raise PredictorError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except ValidationError as error:
        what = ", ".join(".".join(map(str, each["loc"])) or each["msg"] for each in error.errors())
        raise PredictorError(f"{str(path)!r} is no predictor's manifest ({what}): train again") from None
    if manifest.version != VERSION:
        raise PredictorError(f"the predictor in {str(folder)!r} is of another version: train again")
    return manifest


def load_weights(folder: Path, manifest: Manifest) -> Classifier:
    """Raises PredictorError for weights that are missing, damaged, not finite or of another shape."""
    path = folder / manifest.weights
    try:
        data = path.read_bytes()
        if manifest.weights != _name(data):
            raise _unusable(path, "are damaged")
        tensors = load(data)
        classifier = Classifier(
            tensors.pop("columns"),
            tensors.pop("mean"),
            tensors.pop("scale"),
            tuple((tensors[f"{n}.weight"], tensors[f"{n}.bias"]) for n in range(len(tensors) // 2)),
        )
    except OSError as error:
        raise PredictorError(f"cannot read {str(path)!r}: {error.strerror}; train again") from error
    except (SafetensorError, KeyError) as error:
        raise _unusable(path, f"are damaged ({error})") from error
    _check(path, classifier, manifest.width)
    return classifier


def _check(path: Path, classifier: Classifier, width: int) -> None:
    columns = classifier.columns
    right = columns.ndim == 1 and columns.dtype.kind == "i" and len(columns) > 0
    if not right or columns.min() < 0 or columns.max() >= width:
        raise _unusable(path, f"read columns that rows of {width} numbers do not have")
    found = [(weight.shape, bias.shape) for weight, bias in classifier.layers]
    wanted = list(shapes(len(columns)))
    if found != wanted or not classifier.mean.shape == classifier.scale.shape == columns.shape:
        raise _unusable(path, "have other shapes than the predictor's")
    floats = [classifier.mean, classifier.scale, *(part for layer in classifier.layers for part in layer)]
    if any(part.dtype != np.float32 or not np.isfinite(part).all() for part in floats):
        raise _unusable(path, "hold numbers that are not finite 32-bit floats")
    if not (classifier.scale > 0).all():
        raise _unusable(path, "scale by what is not positive")


def _unusable(path: Path, why: str) -> PredictorError:
    return PredictorError(f"the weights {str(path)!r} {why}: train again")


def _name(data: bytes) -> str:
    return f"predictor-{xxhash.xxh3_128_hexdigest(data)}.safetensors"
