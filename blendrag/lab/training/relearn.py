"""Train again from the log, and keep the better predictor (LPC section 3.3: daily)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash
from filelock import FileLock, Timeout

from blendrag.errors import PredictorError
from blendrag.forecast.log import OutcomeLog
from blendrag.forecast.predictor import Predictor
from blendrag.forecast.weights import save_weights
from blendrag.lab.training.metrics import log_loss
from blendrag.lab.training.study import Source, Trained, train
from blendrag.lab.training.training import Examples
from blendrag.private import make_folder

LATEST_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of a new predictor with the old one, on the latest part of the log; losses in nats.

    old_loss: of saying to all what the older part did, where there was no predictor.
    """

    live: bool
    new_loss: float
    old_loss: float
    trained: Trained


def relearn(log: OutcomeLog, predictor: Predictor, folder: Path, seed: int = 0) -> Comparison:
    """Train on the older part of the log. The new predictor is put into ``folder`` only if it beats the old
    one on the latest part, whose conversations it has not seen.

    The old one may have seen some of them, if the log was not longer when it was trained; that is in its
    favour. Raises PredictorError where the log teaches nothing yet.
    """
    known = log.outcomes()
    older, latest = _by_time(known)
    if latest.one_sided or older.one_sided:
        raise PredictorError(f"{len(known.continues):,} outcomes in the log are too few to learn from")
    digest = xxhash.xxh3_128_hexdigest(known.rows.tobytes())
    trained = train(older, latest, predictor.features, Source("log", digest, LATEST_SHARE, seed))
    new = trained.classifier.probability(latest.rows)
    if predictor.classifier is None:
        old = np.full(len(latest.continues), older.continues.mean())
    else:
        old = predictor.judge(latest.rows)
    new_loss, old_loss = log_loss(latest.continues, new), log_loss(latest.continues, old)
    live = new_loss < old_loss
    if live:
        save_weights(folder, trained.classifier, trained.manifest)
    return Comparison(live, new_loss, old_loss, trained)


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


def _by_time(known: Examples) -> tuple[Examples, Examples]:
    """(older, latest): the conversations whose last line is among the latest are wholly there."""
    last = _last_places(known.dialogs)
    border = np.quantile(last, 1 - LATEST_SHARE)
    return known.where(last < border), known.where(last >= border)


def _last_places(dialogs: Sequence[str]) -> npt.NDArray[np.int64]:
    """[n]: where the conversation of each line has its last one."""
    place = {dialog: number for number, dialog in enumerate(dialogs)}
    return np.array([place[dialog] for dialog in dialogs], dtype=np.int64)
