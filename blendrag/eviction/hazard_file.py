"""A trained hazard model in one safetensors file, which says what it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from blendrag.errors import PredictorError
from blendrag.eviction.hazard import FEATURES, Hazard
from blendrag.private import make_folder, write_whole

NAME = "hazard.safetensors"
_VERSION = "2"  # of what the features mean


def save_hazard(folder: Path, hazard: Hazard, facts: Mapping[str, str]) -> None:
    """Put a model in place of the one in ``folder``. facts: on what it was trained, for those who ask.

    Raises PredictorError.
    """
    tensors = {f"borders.{name}": np.array(these) for name, these in hazard.borders.items()}
    tensors |= {
        "ages": np.array(hazard.ages),
        "weights": np.ascontiguousarray(hazard.weights),
        "bias": np.ascontiguousarray(hazard.bias),
        "prefix": np.array([hazard.prefix], np.uint8),
    }
    data = save(tensors, {**facts, "version": _VERSION})
    try:
        make_folder(folder)
        write_whole(folder / NAME, data)
    except OSError as error:
        raise PredictorError(f"cannot write a hazard model to {str(folder)!r}: {error.strerror}") from error


def load_hazard(folder: Path) -> tuple[Hazard, dict[str, str]]:
    """The model in ``folder``, and its facts. Raises PredictorError for one that is missing or unusable."""
    path = folder / NAME
    try:
        with safe_open(path, framework="numpy") as file:
            facts = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    except FileNotFoundError:
        raise PredictorError(f"no hazard model in {str(folder)!r}") from None
    except (OSError, SafetensorError) as error:
        raise PredictorError(f"cannot read {str(path)!r}: {error}; train again") from error
    if facts.pop("version", "") != _VERSION:
        raise PredictorError(f"{str(path)!r} is of another version: train again")
    try:
        hazard = Hazard(
            tuple(tensors["ages"].tolist()),
            {
                name: tuple(tensors[f"borders.{name}"].tolist())
                for name in FEATURES
                if f"borders.{name}" in tensors
            },
            tensors["weights"],
            tensors["bias"],
            bool(tensors["prefix"][0]),
        )
    except (KeyError, IndexError) as error:
        raise PredictorError(f"{str(path)!r} lacks {error}: train again") from None
    _check(path, hazard)
    return hazard, facts


def _check(path: Path, hazard: Hazard) -> None:
    orders = [hazard.ages, *hazard.borders.values()]
    rows, steps = sum(map(len, hazard.borders.values())), len(hazard.ages) - 1
    right = (
        steps > 0
        and hazard.ages[0] == 0.0
        and all(np.isfinite(order).all() and (np.diff(order) > 0.0).all() for order in orders)
        and hazard.weights.shape == (rows, steps)
        and hazard.bias.shape == (steps,)
        and hazard.weights.dtype == hazard.bias.dtype == np.float64
        and bool(np.isfinite(hazard.weights).all() and np.isfinite(hazard.bias).all())
    )
    if not right:
        raise PredictorError(f"{str(path)!r} holds numbers that are no hazard model: train again")
