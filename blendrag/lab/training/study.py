"""From conversations to a predictor, and how good it is on others: what ``blendrag evictor`` does."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from blendrag.errors import ConfigError, PredictorError
from blendrag.forecast.classifier import Classifier
from blendrag.forecast.features import SCALARS, VERSION, Features, Progress, turns_of
from blendrag.forecast.predictor import Predictor
from blendrag.forecast.weights import Manifest
from blendrag.lab.training.dialogs import Dialog, examples, read_dialogs
from blendrag.lab.training.metrics import Quality, TurnsOnly
from blendrag.lab.training.training import VALIDATION_SHARE, Examples, belongs, fit

HELD_OUT = 0.2
_HELD_OUT_PART, _VALIDATION_PART = "held out", "validation"
# What is read beside the vectors: as in the paper; and the prompts' lengths as well.
_SCALARS_TRIED = (SCALARS[:1], SCALARS)


@dataclass(frozen=True, slots=True)
class Source:
    """Where examples are from. digest: of their content. held_out: share of them left out by ``seed``."""

    name: str
    digest: str
    held_out: float
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A classifier, the manifest to save it with, and the loss of each epoch."""

    classifier: Classifier
    manifest: Manifest
    losses: tuple[float, ...]


def train_on_file(
    path: Path,
    features: Features,
    *,
    held_out: float = HELD_OUT,
    seed: int = 0,
    progress: Progress | None = None,
) -> Trained:
    """Train on all conversations of a file but the share ``held_out``, on which its metrics are.

    Raises SourceError; PredictorError where there is nothing to learn.
    """
    dialogs = read_dialogs(path)
    known = _embedded(path, dialogs, features, progress)
    rest, test = known.split(held_out, seed, _HELD_OUT_PART)
    return train(rest, test, features, Source(str(path), _digest(dialogs), held_out, seed))


def train(known: Examples, test: Examples, features: Features, source: Source) -> Trained:
    """Train on ``known``; the metrics are those on ``test``. Raises PredictorError."""
    part, valid = known.split(VALIDATION_SHARE, source.seed, _VALIDATION_PART)
    for examples_, what in ((part, "train on"), (valid, "choose by")):
        if examples_.one_sided:
            raise PredictorError(
                f"{source.name} is too little to {what}: {len(set(known.dialogs)):,} conversations, of which"
                f" {len(set(examples_.dialogs)):,} to {what}, and there both outcomes have to occur"
            )
    fits = [(fit(part, valid, _columns(known, scalars), source.seed), scalars) for scalars in _SCALARS_TRIED]
    best, scalars = min(fits, key=lambda each: each[0].loss)
    turns = TurnsOnly.of(turns_of(known.rows), known.continues)
    manifest = Manifest(
        version=VERSION,
        embedder=features.embedder.name,
        width=known.rows.shape[1],
        layout=features.layout,
        scalars=scalars,
        threshold=best.threshold,
        turn_rates=turns.rates,
        source=source.name,
        source_digest=source.digest,
        held_out=source.held_out,
        seed=source.seed,
        conversations=len(set(known.dialogs)),
        examples=len(known.continues),
        metrics=quality(best.classifier.probability(test.rows), best.threshold, turns, test),
        made_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    return Trained(best.classifier, manifest, best.losses)


def evaluate_on_file(path: Path, predictor: Predictor, progress: Progress | None = None) -> dict[str, Any]:
    """How good the predictor is on a file; on what it was not trained on, if that is where it is from.

    Raises SourceError; ConfigError where it was trained on all of it.
    """
    assert predictor.manifest is not None
    manifest, dialogs = predictor.manifest, read_dialogs(path)
    own = _digest(dialogs) == manifest.source_digest
    if own and not manifest.held_out:
        raise ConfigError(f"--data {path}: the predictor was trained on all of it")
    known = _embedded(path, dialogs, predictor.features, progress)
    if own:
        _, known = known.split(manifest.held_out, manifest.seed, _HELD_OUT_PART)
    if not len(known.continues):
        raise ConfigError(f"--data {path}: too few conversations, none was held out")
    turns = TurnsOnly(manifest.turn_rates)
    return {
        "data": str(path),
        "held_out_only": own,
        "predictor": manifest.model_dump(include={"embedder", "layout", "scalars", "source", "made_at"}),
        **quality(predictor.judge(known.rows), manifest.threshold, turns, known),
    }


def unseen(dialogs: Sequence[Dialog], manifest: Manifest) -> list[Dialog]:
    """Those that the predictor was not trained on: all, or, of its own file, what was held out."""
    if _digest(dialogs) != manifest.source_digest:
        return list(dialogs)
    share, seed = manifest.held_out, manifest.seed
    return [dialog for dialog in dialogs if belongs(dialog.id, share, seed, _HELD_OUT_PART)]


def quality(
    probability: npt.NDArray[np.float64], threshold: float, turns: TurnsOnly, test: Examples
) -> dict[str, Any]:
    """JSON-able: of the predictor and of turns alone; empty where there is nothing to compare with."""
    if not len(test.continues):
        return {}
    return {
        "conversations": len(set(test.dialogs)),
        "examples": len(test.continues),
        "goes_on": float(test.continues.mean()),
        "lpc": Quality.of(test.continues, probability, probability >= threshold).to_dict(),
        "turns_only": turns.quality(turns_of(test.rows), test.continues).to_dict(),
    }


def _embedded(
    path: Path, dialogs: Sequence[Dialog], features: Features, progress: Progress | None
) -> Examples:
    known = list(examples(dialogs))
    if not known:
        raise PredictorError(f"{str(path)!r}: in none of its conversations does a user say anything")
    rows = features.rows([each.window for each in known], progress)
    continues = np.array([each.continues for each in known], dtype=bool)
    return Examples(rows, continues, [each.dialog for each in known])


def _columns(known: Examples, scalars: Sequence[str]) -> npt.NDArray[np.int64]:
    vectors = known.rows.shape[1] - len(SCALARS)
    return np.array([*range(vectors), *(vectors + SCALARS.index(name) for name in scalars)], dtype=np.int64)


def _digest(dialogs: Sequence[Dialog]) -> str:
    """Of the conversations as they are, however the file is packed."""
    digest = xxhash.xxh3_128()
    for dialog in dialogs:
        digest.update(dialog.model_dump_json().encode())
    return digest.hexdigest()
