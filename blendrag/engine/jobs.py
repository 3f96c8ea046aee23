"""Long operations, run in slices: between two of the engine's steps, ingest takes no longer than a blend may.

A client asks again until its operation is done (:meth:`RunningEngine.call`), and the engine takes its steps
in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future, wait
from typing import Any, TypeVar

from blendrag.engine.forward.ranks import ALONE, Ranks
from blendrag.engine.forward.slices import StepClock
from blendrag.errors import BlendragError

# Seconds of a slice while the engine takes no steps: how long a new request may wait for its first step.
_IDLE_S = 0.2
_QUIET = 3  # slices without a step between: a slice goes to the next job before the engine steps

POLL_S = 0.002
"""Seconds between two looks at whether another thread is done."""

T = TypeVar("T")
Job = Generator[bool | None, None, Any]  # yields True while it only waits for another thread

JobName = tuple[str, int]
"""The name of a job: its client, and a number that the client has given to no other job."""


class Jobs:
    """The jobs that have begun. Only one of each client's goes on at a time. ``share``: of an engine step, at
    most.

    Several ranks pause where the owner does. A BlendragError of a job is raised on all of them.
    """

    def __init__(self, clock: StepClock, share: float, ranks: Ranks = ALONE) -> None:
        self._clock, self._share, self._ranks = clock, share, ranks
        self._begun: dict[JobName, Job] = {}
        self._steps = self._quiet = 0  # engine's steps before the last slice; slices since a step
        self._current: dict[str, JobName] = {}  # by client

    def begin(self, name: JobName, job: Job) -> None:
        """Register a job; nothing of it is done yet."""
        self._begun[name] = job

    def __contains__(self, name: JobName) -> bool:
        """Return whether there is something left to do of the job."""
        return name in self._begun

    def go_on(self, name: JobName) -> tuple[bool, Any]:
        """Run a slice of the job. Returns whether it has ended, and its result. Raises its error."""
        job, begin = self._begun.pop(name), time.perf_counter()
        if left := self._begun.pop(self._current.get(name[0], name), None):
            left.close()  # its client has given up
        self._current[name[0]] = name
        steps, self._steps = self._steps, self._clock.steps
        self._quiet = self._quiet + 1 if steps == self._steps else 0
        others = self._share < 1 and self._quiet < _QUIET
        budget = self._clock.slice_s(self._share) - self._clock.blended_s if others else _IDLE_S
        try:
            with self._ranks.together(BlendragError, StopIteration):
                while True:
                    before = time.perf_counter()
                    waits, now = next(job), time.perf_counter()
                    # Another piece would overshoot it.
                    if self._ranks.choose(waits or now - begin + now - before > budget):
                        break
        except StopIteration as end:
            return True, end.value
        finally:
            self._clock.aside(time.perf_counter() - begin)
        self._begun[name] = job
        return False, None


def by_owner(ranks: Ranks, thread: Executor, work: Callable[[], T]) -> Generator[bool, None, T]:
    """Run work in another thread of the owner's, and wait for it between the engine's steps."""
    begun = thread.submit(work) if ranks.first else Future[T]()
    while ranks.choose(ranks.first and bool(wait([begun], timeout=POLL_S).not_done)):
        yield True
    return ranks.outcome(begun.result)
