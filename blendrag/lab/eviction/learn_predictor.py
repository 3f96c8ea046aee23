"""From conversations, or from the log of them, to a predictor, and how good it is on others."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from filelock import FileLock, Timeout

from blendrag.errors import ConfigError, PredictorError
from blendrag.eviction.hazard import Floats
from blendrag.forecast.classifier import Array, Classifier, Manifest, Metrics, save_weights
from blendrag.forecast.conversation import Window
from blendrag.forecast.features import LAYOUT, SCALARS, VERSION, Features
from blendrag.forecast.outcome_log import OutcomeLog
from blendrag.forecast.predictor import Predictor
from blendrag.lab.eviction.fit_classifier import (
    VALIDATION_SHARE,
    Examples,
    belongs,
    fit,
    log_loss,
    quality_of,
)
from blendrag.lab.eviction.readers import Dialog, read_dialogs
from blendrag.private import make_folder
from blendrag.progress import SILENT, Progress

HELD_OUT = 0.2
_HELD_OUT_PART, _VALIDATION_PART = "held out", "validation"
# What is read beside the vectors: as in the paper; and the prompts' lengths as well.
_SCALARS_TRIED = (SCALARS[:1], SCALARS)
LATEST_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Example:
    """What is known when a prompt comes in, and whether another one follows."""

    dialog: str
    window: Window
    continues: bool


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where examples are from. digest: of their content. held_out: share of them left out by ``seed``."""

    name: str
    digest: str
    held_out: float
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A classifier, and the manifest to save it with."""

    classifier: Classifier
    manifest: Manifest

    def to_dict(self) -> dict[str, Any]:
        return self.manifest.model_dump(exclude={"weights"})


def train_on_file(
    path: Path,
    features: Features,
    *,
    held_out: float = HELD_OUT,
    seed: int = 0,
    progress: Progress = SILENT,
) -> Trained:
    """Train on all conversations of a file but the share ``held_out``, on which its metrics are.

    Raises SourceError; PredictorError where there is nothing to learn.
    """
    dialogs = read_dialogs(path)
    known = _embedded(path, dialogs, features, progress)
    rest, test = known.split(held_out, seed, _HELD_OUT_PART)
    return train(rest, test, features, Provenance(str(path), _digest(dialogs), held_out, seed))


def train(known: Examples, test: Examples, features: Features, source: Provenance) -> Trained:
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
    manifest = Manifest(
        version=VERSION,
        embedder=features.embedder.name,
        width=known.rows.shape[1],
        layout=LAYOUT,
        scalars=scalars,
        source=source.name,
        source_digest=source.digest,
        held_out=source.held_out,
        seed=source.seed,
        conversations=len(set(known.dialogs)),
        examples=len(known.continues),
        metrics=metrics_on(test, best.classifier.probability) if len(test.continues) else None,
        made_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    return Trained(best.classifier, manifest)


@dataclass(frozen=True, slots=True)
class Judged:
    """How good a predictor is on the file ``data``; held_out_only: which it was trained on a part of."""

    data: str
    held_out_only: bool
    predictor: Manifest
    metrics: Metrics

    def to_dict(self) -> dict[str, Any]:
        made = self.predictor.model_dump(include={"embedder", "layout", "scalars", "source", "made_at"})
        found = {"data": self.data, "held_out_only": self.held_out_only, "predictor": made}
        return found | asdict(self.metrics)


def evaluate_on_file(path: Path, predictor: Predictor, progress: Progress = SILENT) -> Judged:
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
    return Judged(str(path), own, manifest, metrics_on(known, predictor.judge))


def unseen(dialogs: Sequence[Dialog], manifest: Manifest) -> list[Dialog]:
    """Those that the predictor was not trained on: all, or, of its own file, what was held out."""
    if _digest(dialogs) != manifest.source_digest:
        return list(dialogs)
    share, seed = manifest.held_out, manifest.seed
    return [dialog for dialog in dialogs if belongs(dialog.id, share, seed, _HELD_OUT_PART)]


def metrics_on(test: Examples, forecast: Callable[[Array], Floats]) -> Metrics:
    """forecast: the chances [n] that the conversations of rows [n, width] go on; n > 0."""
    return Metrics(
        conversations=len(set(test.dialogs)),
        examples=len(test.continues),
        goes_on=float(test.continues.mean()),
        lpc=quality_of(test.continues, forecast(test.rows)),
    )


def examples(dialogs: Iterable[Dialog]) -> Iterator[Example]:
    """One per prompt: the prompts so far, and whether the user says anything after it (LPC section 3.2).

    Answers are left out, as are all facts that are only known when the conversation is over.
    """
    for dialog in dialogs:
        prompts = dialog.prompts
        for turns in range(1, len(prompts) + 1):
            yield Example(dialog.id, Window.of(prompts[:turns]), turns < len(prompts))


@dataclass(frozen=True, slots=True)
class PredictorComparison:
    """Of a new predictor with the old one, on the latest part of the log; losses in nats.

    old_loss: of saying to all what the older part did, where there was no predictor.
    """

    live: bool
    new_loss: float
    old_loss: float
    trained: Trained

    def to_dict(self) -> dict[str, Any]:
        losses = {"new_loss": self.new_loss, "old_loss": self.old_loss}
        return self.trained.to_dict() | {"live": self.live} | losses


def relearn(log: OutcomeLog, predictor: Predictor, folder: Path, seed: int = 0) -> PredictorComparison:
    """Train on the older part of the log. The new predictor is put into ``folder`` only if it beats the old
    one on the latest part, whose conversations it has not seen.

    The old one may have seen some of them, if the log was not longer when it was trained; that is in its
    favour. Raises PredictorError where the log teaches nothing yet.
    """
    outcomes = log.outcomes()
    known = Examples(outcomes.rows, outcomes.continues, outcomes.conversations)
    older, latest = _by_time(known)
    if latest.one_sided or older.one_sided:
        raise PredictorError(f"{len(known.continues):,} outcomes in the log are too few to learn from")
    digest = xxhash.xxh3_128_hexdigest(known.rows.tobytes())
    trained = train(older, latest, predictor.features, Provenance("log", digest, LATEST_SHARE, seed))
    new = trained.classifier.probability(latest.rows)
    if predictor.classifier is None:
        old = np.full(len(latest.continues), older.continues.mean())
    else:
        old = predictor.judge(latest.rows)
    new_loss, old_loss = log_loss(latest.continues, new), log_loss(latest.continues, old)
    live = new_loss < old_loss
    if live:
        save_weights(folder, trained.classifier, trained.manifest)
    return PredictorComparison(live, new_loss, old_loss, trained)


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Keeps a training that takes longer than a day, or a user, from training into ``folder`` as well.

    Raises PredictorError if another one has begun.
    """
    try:
        make_folder(folder)
        lock = FileLock(folder / "training.lock", timeout=0, mode=0o600)
        lock.acquire()
    except Timeout:
        raise PredictorError(f"another training into {str(folder)!r} is going on") from None
    except OSError as error:
        raise PredictorError(f"cannot train into {str(folder)!r}: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()


def _embedded(path: Path, dialogs: Sequence[Dialog], features: Features, progress: Progress) -> Examples:
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


def _by_time(known: Examples) -> tuple[Examples, Examples]:
    """(older, latest): the conversations whose last line is among the latest are wholly there."""
    last = _last_places(known.dialogs)
    border = np.quantile(last, 1 - LATEST_SHARE)
    return known.where(last < border), known.where(last >= border)


def _last_places(dialogs: Sequence[str]) -> npt.NDArray[np.int64]:
    """[n]: where the conversation of each line has its last one."""
    place = {dialog: number for number, dialog in enumerate(dialogs)}
    return np.array([place[dialog] for dialog in dialogs], dtype=np.int64)
