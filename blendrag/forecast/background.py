"""The predictor in a thread next to a running engine: asked without waiting, answering when it can."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import Empty, Full, Queue
from typing import TypeVar

from blendrag.errors import BlendragError, PredictorError
from blendrag.eviction.classifier import Classifier
from blendrag.eviction.fitted import load_fitted
from blendrag.forecast.features import Features, Rows
from blendrag.forecast.log import Prompt

Heard = Callable[[Mapping[str, float]], None]  # takes, by conversation, the chance that it goes on
Record = Callable[[Sequence[Prompt], Sequence[Rows | None]], None]

CAPACITY = 256
BATCH = 32
_NONE, _UNLOGGED = "no forecasts, eviction as LRU", "prompts are not logged"

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Predictor:
    """The predictor: an embedder and the classifier that was fitted to its vectors; not for several threads
    at once. Without a classifier it only makes rows for the log."""

    features: Features
    classifier: Classifier | None

    @classmethod
    def load(cls, file: Path, make: Callable[[str], Features]) -> Predictor:
        """Load the fitted predictor. make: makes the features of an embedder. Raises PredictorError."""
        fitted = load_fitted(file)
        if fitted.classifier is None:
            raise PredictorError(f"there is no predictor in {str(file)!r} yet: blendrag fit makes one")
        return cls(make(fitted.embedder), fitted.classifier)


@dataclass(frozen=True, slots=True)
class ForecastCounts:
    """The counts since the start. dropped: the queue was full. unanswered: there was no predictor, or it
    failed; the chunks of those conversations leave as under LRU. busy_s: processor time of the predictor's
    thread for these requests. reason: what went wrong last."""

    asked: int = 0
    answered: int = 0
    dropped: int = 0
    unanswered: int = 0
    busy_s: float = 0.0
    reason: str = ""


class BackgroundPredictor:
    """A predictor that answers in a thread of its own, in batches, with the latest prompt of each
    conversation.

    load: makes the predictor, in that thread: libraries and weights take seconds. heard: is called there as
    well, once per batch. record: writes prompts down, with the rows that were made of them, if they may be.

    The thread computes on one processor, with the process's own priority. With a lower priority it would be
    put off while it holds the interpreter's lock, and on a busy machine everything else in the process with
    it: 40 to 100 ms for nearly every prompt, where it now is 5 to 30 for some.
    """

    def __init__(
        self,
        load: Callable[[], Predictor],
        heard: Heard,
        record: Callable[[Predictor | None], Record] | None = None,
        *,
        capacity: int = CAPACITY,
    ) -> None:
        self._load, self._heard, self._open_log = load, heard, record
        self._queue: Queue[Prompt | None] = Queue(capacity)
        self._counts, self._lock = ForecastCounts(), threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="blendrag-predictor", daemon=True)
        self._thread.start()

    def ask(self, prompt: Prompt) -> bool:
        """Queue a prompt, if there is room. One without a window is only written down."""
        asked = int(prompt.window is not None)
        try:
            self._queue.put_nowait(prompt)
        except Full:
            self._count(asked=asked, dropped=1)
            return False
        self._count(asked=asked)
        return True

    @property
    def counts(self) -> ForecastCounts:
        with self._lock:
            return self._counts

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop after the batch that is being answered. Waiting prompts are written down, but not answered."""
        self._closing.set()
        with suppress(Full):
            self._queue.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        self._tried(_compute_alone)
        predictor = self._tried(self._load)
        if predictor and predictor.classifier is None:
            self._warn("there is no predictor yet: blendrag fit makes one")
        opened = self._open_log
        record = self._tried(lambda: opened(predictor), _UNLOGGED) if opened else None
        going = True
        while going:
            batch = self._batch()
            going = None not in batch and not (self._closing.is_set() and self._queue.empty())
            if prompts := [prompt for prompt in batch if prompt]:
                began = time.thread_time()
                self._tried(partial(self._answer, prompts, predictor, record))
                self._count(busy_s=time.thread_time() - began)

    def _batch(self) -> list[Prompt | None]:
        """Return prompts, as soon as there is one; None among them is the end."""
        batch = [self._queue.get()]
        with suppress(Empty):
            while len(batch) < BATCH:
                batch.append(self._queue.get_nowait())
        return batch

    def _answer(self, batch: list[Prompt], predictor: Predictor | None, record: Record | None) -> None:
        asking = [(prompt, prompt.window) for prompt in batch if prompt.window is not None]
        rows: dict[int, Rows] = {}
        answered = 0
        try:
            if predictor is None or not asking or self._closing.is_set():
                return
            made = predictor.features.rows([window for _, window in asking])
            rows = {id(prompt): row for (prompt, _), row in zip(asking, made, strict=True)}
            if predictor.classifier is not None:
                chances = predictor.classifier.probability(made).tolist()
                self._heard(
                    {prompt.conversation or "": p for (prompt, _), p in zip(asking, chances, strict=True)}
                )
                answered = len(asking)
        finally:
            if record:
                self._tried(partial(record, batch, [rows.get(id(prompt)) for prompt in batch]), _UNLOGGED)
            self._count(answered=answered, unanswered=len(asking) - answered)

    def _tried(self, work: Callable[[], _T], what: str = _NONE) -> _T | None:
        """Return the result of ``work``; None if it fails, which must not end the thread."""
        try:
            return work()
        except Exception as error:
            expected = isinstance(error, BlendragError)
            self._warn(str(error) or type(error).__name__, what, exc_info=not expected)
            return None

    def _warn(self, reason: str, what: str = _NONE, exc_info: bool = False) -> None:
        if reason != self.counts.reason:
            _log.warning("%s: %s", what, reason, exc_info=exc_info)
            with self._lock:
                self._counts = replace(self._counts, reason=reason)

    def _count(self, **more: float) -> None:
        with self._lock:
            now = {name: getattr(self._counts, name) + value for name, value in more.items()}
            self._counts = replace(self._counts, **now)


def _compute_alone() -> None:
    """Have torch compute in this thread only, and change nothing for the others.

    How many threads OpenMP takes is each thread's own affair; but torch keeps the number that was set last
    for threads that are new to it. So another thread sets it back.
    """
    import torch

    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    other = threading.Thread(target=torch.set_num_threads, args=(usual,))
    other.start()
    other.join()
