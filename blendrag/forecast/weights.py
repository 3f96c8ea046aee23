"""A trained classifier in a folder: weights in safetensors, and a manifest that says what they are for.

The manifest names its weights file, whose name holds its digest. It is written last and in one step, so that
a process that looks while another writes finds the old pair or the new one.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from blendrag.errors import PredictorError
from blendrag.forecast.classifier import Classifier, shapes
from blendrag.forecast.features import VERSION, Layout
from blendrag.private import make_folder
from blendrag.settings import Settings

MANIFEST = "predictor.json"


class Manifest(BaseModel):
    """What a predictor was made of. Times are ISO 8601, shares are of 1."""

    model_config = ConfigDict(frozen=True)

    version: int = Field(description="Of the rows that it reads: features.VERSION.")
    embedder: str
    width: int = Field(gt=0, description="Of its rows.")
    layout: Layout
    scalars: tuple[str, ...] = Field(description="What it reads beside vectors.")
    threshold: float = Field(gt=0, lt=1, description="The probability from which on it says: goes on.")
    turn_rates: tuple[float, ...] = Field(min_length=1, description="Of going on, after 1, 2, ... turns.")
    source: str
    source_digest: str
    held_out: float = Field(ge=0, lt=1, description="Share of its conversations that was not trained on.")
    seed: int
    conversations: int
    examples: int
    metrics: dict[str, Any] = Field(description="On what was held out.")
    made_at: str
    weights: str = Field(default="", pattern=r"^(predictor-[0-9a-f]{32}\.safetensors)?$")


def default_folder(settings: Settings | None = None) -> Path:
    """Where the predictor of this user is, unless another folder is named."""
    return (settings or Settings.load()).cache_dir.expanduser() / "evictor"


def save_weights(folder: Path, classifier: Classifier, manifest: Manifest) -> Manifest:
    """Put a predictor in place of what is in ``folder``. Raises PredictorError."""
    tensors = {"columns": classifier.columns, "mean": classifier.mean, "scale": classifier.scale}
    for number, (weight, bias) in enumerate(classifier.layers):
        tensors |= {f"{number}.weight": weight, f"{number}.bias": bias}
    data = save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()})
    named = manifest.model_copy(update={"weights": _name(data)})
    try:
        make_folder(folder)
        _write(folder / named.weights, data)
        _write(folder / MANIFEST, (named.model_dump_json(indent=2) + "\n").encode())
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


def _write(path: Path, data: bytes) -> None:
    """Wholly or not at all."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".predictor-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
