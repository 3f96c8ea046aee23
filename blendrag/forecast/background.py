"""The predictor beside a running engine: asked without waiting, answering when it can."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, Full, Queue
from typing import TypeVar

from blendrag.errors import BlendragError
from blendrag.forecast.conversation import Window
from blendrag.forecast.outcome_log import OutcomeLog
from blendrag.forecast.predictor import Predictor

Heard = Callable[[Mapping[str, float]], None]  # by conversation, the chance that it goes on

CAPACITY = 256
BATCH = 32
_LOOK_S = 60.0  # without requests, so often is looked for a newer predictor

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ForecastCounts:
    """Since the start. dropped: the queue was full. unanswered: there was no predictor, or it failed; the
    chunks of those conversations leave as under LRU. busy_s: processor time of the predictor's thread for
    these requests. reason: of what went wrong last, until another predictor is loaded."""

    asked: int = 0
    answered: int = 0
    dropped: int = 0
    unanswered: int = 0
    busy_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Request:
    conversation: str
    window: Window
    at: float


class BackgroundPredictor:
    """Answers in a thread of its own, in batches, with the latest prompt of each conversation.

    load: makes the predictor, in that thread: libraries and weights take seconds. version: of what it would
    make now; where that has changed, it is called again. heard: is called there as well, once per batch. log:
    where outcomes are kept, if they may be.

    The thread computes on one processor, with the process's own priority. With a lower one it would be put
    off while it holds the interpreter's lock, and on a machine that is busy everything else in the process
    with it: 40 to 100 ms for nearly every prompt, where it now is 5 to 30 for some.
    """

    def __init__(
        self,
        load: Callable[[], Predictor],
        heard: Heard,
        *,
        version: Callable[[], object] = lambda: None,
        log: Callable[[Predictor], OutcomeLog] | None = None,
        clock: Callable[[], float] = time.time,
        capacity: int = CAPACITY,
    ) -> None:
        self._load, self._version, self._heard = load, version, heard
        self._open_log, self._clock = log, clock
        self._queue: Queue[_Request | None] = Queue(capacity)
        self._counts, self._lock = ForecastCounts(), threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="blendrag-predictor", daemon=True)
        self._thread.start()

    def ask(self, conversation: str, window: Window) -> bool:
        """Whether there was room for the request. Returns at once."""
        request = _Request(conversation, window, self._clock())
        try:
            self._queue.put_nowait(request)
        except Full:
            self._count(asked=1, dropped=1)
            return False
        self._count(asked=1)
        return True

    @property
    def counts(self) -> ForecastCounts:
        with self._lock:
            return self._counts

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop after the batch that is being answered; what waits is not answered."""
        self._closing.set()
        with suppress(Full):
            self._queue.put_nowait(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        self._tried(_compute_alone)
        version = self._version()
        predictor, log = self._loaded()
        while (batch := self._batch()) is not None:
            if (now := self._version()) != version:
                version = now
                if log:
                    log.close()
                predictor, log = self._loaded()
            if batch:
                began = time.thread_time()
                self._tried(partial(self._answer, batch, predictor, log))
                self._count(busy_s=time.thread_time() - began)
        if log:
            log.close()

    def _loaded(self) -> tuple[Predictor | None, OutcomeLog | None]:
        predictor, opened = self._tried(self._load), self._open_log
        if predictor and predictor.classifier is None:
            self._warn("there is no predictor yet: blendrag evictor train makes one")
        elif predictor:
            with self._lock:
                self._counts = replace(self._counts, reason="")
        return predictor, self._tried(partial(opened, predictor)) if opened and predictor else None

    def _batch(self) -> list[_Request] | None:
        """Requests, as soon as there is one; an empty list after a minute without any; None when closing."""
        batch: list[_Request | None] = []
        with suppress(Empty):
            batch.append(self._queue.get(timeout=_LOOK_S))
            while len(batch) < BATCH:
                batch.append(self._queue.get_nowait())
        return None if self._closing.is_set() else [request for request in batch if request]

    def _answer(self, batch: list[_Request], predictor: Predictor | None, log: OutcomeLog | None) -> None:
        answered = 0
        try:
            if predictor is None:
                return
            rows = predictor.features.rows([request.window for request in batch])
            conversations = [request.conversation for request in batch]
            latest = dict(zip(conversations, predictor.judge(rows), strict=True))
            if predictor.classifier is not None:
                self._heard({whose: float(probability) for whose, probability in latest.items()})
                answered = len(batch)
            if log:
                log.record(conversations, [request.at for request in batch], rows)
        finally:
            self._count(answered=answered, unanswered=len(batch) - answered)

    def _tried(self, work: Callable[[], _T]) -> _T | None:
        """What ``work`` gives; None if it fails. Whatever that is, it must not end the thread."""
        try:
            return work()
        except Exception as error:
            expected = isinstance(error, BlendragError)
            self._warn(str(error) or type(error).__name__, exc_info=not expected)
            return None

    def _warn(self, reason: str, exc_info: bool = False) -> None:
        if reason != self.counts.reason:
            _log.warning("no forecasts, eviction as LRU: %s", reason, exc_info=exc_info)
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
