"""Long operations in slices: between two of the engine's steps, ingest takes no longer than a blend may.

A client asks again until one is done (:meth:`RunningEngine.call`), and the engine takes its steps in between.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from blendrag.engine.worker.ranks import ALONE, Ranks
from blendrag.engine.worker.slices import StepClock
from blendrag.errors import BlendragError

# While the engine takes no steps: so long may a request that arrives have to wait for its first.
_IDLE_S = 0.2
_QUIET = 3  # slices without a step between them: one is handed to the next job before the engine can take it

LOOK_S = 0.002  # how often it is looked whether another thread is done

T = TypeVar("T")
Job = Generator[bool | None, None, Any]  # yields True while it only waits for another thread

JobName = tuple[str, int]
"""Of a job: its client, and a number that this has given to no other."""


class Jobs:
    """Those that have begun; each client has one go on at a time. ``share``: of an engine step, at most.

    Several ranks pause where the owner does. What a job raises of BlendragErrors, it raises on all of them.
    """

    def __init__(self, clock: StepClock, share: float, ranks: Ranks = ALONE) -> None:
        self._clock, self._share, self._ranks = clock, share, ranks
        self._begun: dict[JobName, Job] = {}
        self._steps = self._quiet = 0  # of the engine, before the last slice; slices since there was one
        self._current: dict[str, JobName] = {}  # by client

    def begin(self, name: JobName, job: Job) -> None:
        """Nothing of it is done yet."""
        self._begun[name] = job

    def __contains__(self, name: JobName) -> bool:
        """Whether there is something left to do of it."""
        return name in self._begun

    def go_on(self, name: JobName) -> tuple[bool, Any]:
        """Run a slice of it: whether it has ended, and its result. Raises what it raises."""
        job, begin = self._begun.pop(name), time.perf_counter()
        if left := self._begun.pop(self._current.get(name[0], name), None):
            left.close()  # its client has given up
        self._current[name[0]] = name
        steps, self._steps = self._steps, self._clock.steps
        self._quiet = self._quiet + 1 if steps == self._steps else 0
        beside = self._share < 1 and self._quiet < _QUIET
        budget = self._clock.slice_s(self._share) - self._clock.blended_s if beside else _IDLE_S
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


def awaited(work: Future[T]) -> Generator[bool, None, T]:
    """Another thread's work, waited for between the engine's steps."""
    while wait([work], timeout=LOOK_S).not_done:
        yield True
    return work.result()
