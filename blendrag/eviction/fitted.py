"""The file with what ``blendrag fit`` has found: the predictor of ``lpc`` and the table of ``lpc+``."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from blendrag.errors import BlendragWarning, PredictorError
from blendrag.eviction.classifier import Classifier
from blendrag.eviction.hazard import FEATURES, Hazard
from blendrag.files.private import make_folder, write_whole

VERSION = "3"  # of the file, of the rows that the predictor reads, and of the meaning of the table's features

Tensors = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """The results of a fit. classifier: whether a conversation goes on, from rows of ``embedder``. hazard:
    when a chunk is used again. Either may be missing. facts: on what they were fitted, by the policy's
    name."""

    classifier: Classifier | None = None
    embedder: str = ""
    hazard: Hazard | None = None
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def evictor_folder(cache_dir: Path) -> Path:
    """Return the folder of this user's log and of what was fitted to it."""
    return cache_dir.expanduser() / "evictor"


def fitted_file(cache_dir: Path) -> Path:
    """Return the file of this user's fit."""
    return evictor_folder(cache_dir) / "fitted.safetensors"


def with_file(policy: str, cache_dir: Path) -> str:
    """Return the policy's name with the file that it uses, where it needs one. Warns if there is none."""
    if policy != "lpc+":
        return policy
    file = fitted_file(cache_dir)
    try:
        if load_fitted(file).hazard is None:
            raise PredictorError(
                f"{str(file)!r} has no table for it yet: blendrag fit learns one from the log"
            )
    except PredictorError as error:
        warnings.warn(f"lpc+ is LRU: {error}", BlendragWarning, stacklevel=2)
        return policy
    return f"{policy}@{file}"


def save_fitted(file: Path, fitted: Fitted) -> None:
    """Put what was fitted in place of what is in ``file``, in one step. Raises PredictorError."""
    tensors: Tensors = {}
    if (classifier := fitted.classifier) is not None:
        tensors |= {"lpc.mean": classifier.mean, "lpc.scale": classifier.scale}
        for number, (weight, bias) in enumerate(classifier.layers):
            tensors |= {f"lpc.{number}.weight": weight, f"lpc.{number}.bias": bias}
    if (hazard := fitted.hazard) is not None:
        assert not hazard.prefix, "a store's chunks are found one by one"
        tensors |= {f"lpc+.borders.{name}": np.array(these) for name, these in hazard.borders.items()}
        tensors |= {
            "lpc+.ages": np.array(hazard.ages),
            "lpc+.weights": hazard.weights,
            "lpc+.bias": hazard.bias,
        }
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    facts = {"version": VERSION, "embedder": fitted.embedder, "facts": json.dumps(fitted.facts)}
    data = save(tensors, facts | {"digest": _digest(tensors)})
    try:
        make_folder(file.parent)
        write_whole(file, data)
    except OSError as error:
        raise PredictorError(f"cannot write to {str(file.parent)!r}: {error.strerror}") from error


def load_fitted(file: Path) -> Fitted:
    """Read what was fitted. Raises PredictorError if there is no file, or it is not as it was written."""
    try:
        with safe_open(file, framework="numpy") as opened:
            facts = dict(opened.metadata() or {})
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (no mapping)
        if facts.get("version") != VERSION:
            raise ValueError("of another version")
        if facts.get("digest") != _digest(tensors):
            raise ValueError("damaged")
        parts = {name.partition(".")[0] for name in tensors}
        return Fitted(
            _classifier(tensors) if "lpc" in parts else None,
            facts["embedder"],
            _hazard(tensors) if "lpc+" in parts else None,
            json.loads(facts["facts"]),
        )
    except FileNotFoundError:
        raise PredictorError(
            f"there is no predictor in {str(file.parent)!r}: blendrag fit makes one"
        ) from None
    except (OSError, SafetensorError) as error:
        raise PredictorError(f"cannot read {str(file)!r}: {error}; fit again") from error
    except (ValueError, KeyError) as error:
        raise PredictorError(f"{str(file)!r} is unusable ({error}): fit again") from error


def _digest(tensors: Tensors) -> str:
    return xxhash.xxh3_128_hexdigest(save(tensors))


def _classifier(tensors: Tensors) -> Classifier:
    count = sum(name.startswith("lpc.") and name.endswith(".weight") for name in tensors)
    layers = tuple((tensors[f"lpc.{n}.weight"], tensors[f"lpc.{n}.bias"]) for n in range(count))
    return Classifier(tensors["lpc.mean"], tensors["lpc.scale"], layers)


def _hazard(tensors: Tensors) -> Hazard:
    borders = {
        name: tuple(tensors[f"lpc+.borders.{name}"].tolist())
        for name in FEATURES
        if f"lpc+.borders.{name}" in tensors
    }
    ages, weights, bias = (tensors[f"lpc+.{name}"] for name in ("ages", "weights", "bias"))
    return Hazard(tuple(ages.tolist()), borders, weights, bias, prefix=False)
