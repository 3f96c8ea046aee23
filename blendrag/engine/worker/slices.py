"""Blends go on by slices, one per engine step, so that no request waits for another one's blend to end.

Beside running answers a slice is a share of the step: with one half, a token takes at most about twice its
time. In an engine that has nothing else to do it is short enough for whatever request comes next.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable
from concurrent.futures import Executor, wait
from statistics import median
from typing import Any, NamedTuple, TypeVar

from blendrag.engine.recipe import BlendOrder
from blendrag.engine.report import BlendReport
from blendrag.engine.worker.ranks import ALONE, Ranks

IDLE_S = 0.04
"""Seconds of a slice while the engine computes nothing else: so long a new request may have to wait."""

# After a blend has ended, steps without any, so that its request's first token leaves before others' work.
# Where steps are scheduled ahead, the scheduler hears of it in the first of them, the token is computed in
# the second, and leaves while the third one runs.
_HELD_STEPS = 3

_KEPT_STEPS = 8
_MIN_ROWS, _MAX_ROWS, _FIRST_ROWS = 32, 4096, 128
_PIECES = 3  # beside answers, a slice is made of about so many: what it overshoots by is less than one

T = TypeVar("T")


class Pace:
    """When a blend pauses, how many rows of a layer it computes before it asks, and how long it may wait for
    another thread. Of several ranks, the owner's clock counts."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self._rows = _FIRST_ROWS  # beside answers
        self._piece_s = self._end = self._asked = 0.0
        self._idle = True

    @property
    def rows(self) -> int:
        """How many rows a piece of a layer has at most. While the engine has nothing else to do, whatever the
        clock says: what is computed in other pieces may be rounded otherwise."""
        return _MAX_ROWS if self._idle else self._rows

    def begin(self, budget_s: float, *, idle: bool = False) -> None:
        """A slice of so many seconds begins now. idle: the engine has nothing else to do."""
        self._asked = time.perf_counter()
        self._end = self._asked + budget_s
        self._piece_s = budget_s / _PIECES
        self._idle = idle

    def pause(self, rows: int) -> bool:
        """Asked after each piece of so many ``rows``: whether another one would overshoot the slice."""
        now = time.perf_counter()
        taken, self._asked = now - self._asked, now
        fitting = int(min(rows * self._piece_s / max(taken, 1e-6), _MAX_ROWS))
        learnt = max(_MIN_ROWS, min(fitting, 2 * self._rows))
        self._rows, pauses = self.ranks.choose((learnt, now + taken > self._end))
        return pauses

    def arrived(self, ready: Callable[[float], bool]) -> bool:
        """Whether what another thread brings is there on all ranks. ``ready`` is told how many seconds it may
        wait for it: none beside running answers."""
        left = max(0.0, self._end - time.perf_counter()) if self._idle else 0.0
        there = ready(left)
        self._asked = time.perf_counter()
        return self.ranks.all(there)


class StepClock:
    """What the engine's own part of a step takes, from one slice's end to the next one's beginning."""

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._left = self._entered = 0.0
        self.steps = 0
        self.blended_s = 0.0
        """What the last slice took."""

    def enter(self, *, follows: bool) -> None:
        """The engine's part has ended. follows: whether nothing but it was since the last slice."""
        self.steps += 1
        self._entered = time.perf_counter()
        if follows and self._left:
            self._took.append(self._entered - self._left)

    def leave(self) -> None:
        """Ours has."""
        self._left = time.perf_counter()
        self.blended_s = self._left - self._entered

    def aside(self, seconds: float) -> None:
        """So long the engine did something else, between two of its steps."""
        if self._left:
            self._left += seconds

    def slice_s(self, share: float) -> float:
        """Seconds that make blending ``share`` of a step; 1: as long as it takes."""
        step = median(self._took) if self._took else 0.0
        return step * share / (1.0 - share) if share < 1 else float("inf")


# A blend that pauses between its slices.
Sliced = Generator[None, None, BlendReport]


def exhaust(work: Generator[Any, None, T]) -> T:
    """All of it, without a pause."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def beside(
    thread: Executor, pace: Pace, work: Callable[[], T], undo: Callable[[T], None] = lambda _: None
) -> Generator[None, None, T]:
    """Have a thread do what may wait for a disk, a server or a lock, with pauses until it is done.

    undo: what is done with a result that nobody waits for any more.
    """
    done = thread.submit(work)
    try:
        while not pace.arrived(lambda left: not wait([done], left).not_done):
            yield
    except GeneratorExit:
        done.add_done_callback(lambda late: None if late.exception() else undo(late.result()))
        raise
    return done.result()


class Finished(NamedTuple):
    """A blend that has ended: its report, or what it raised."""

    order: BlendOrder
    outcome: BlendReport | Exception


class BlendQueue:
    """Orders in the order of their arrival: the first is finished before the second begins, so that it has
    its first token soonest and one request's stored KV is in flight at a time."""

    def __init__(self, start: Callable[[BlendOrder, Pace], Sliced], ranks: Ranks = ALONE) -> None:
        self._start, self._pace = start, Pace(ranks)
        self._waiting: deque[BlendOrder] = deque()
        self._current: tuple[BlendOrder, Sliced] | None = None
        self._held = 0  # steps

    def __bool__(self) -> bool:
        return bool(self._current or self._waiting)

    def add(self, orders: Iterable[BlendOrder]) -> None:
        self._waiting.extend(orders)

    def run(self, budget_s: float, *, idle: bool = False) -> Finished | None:
        """A slice of about so many seconds of one blend; returns it if that has ended it."""
        if self._held:
            self._held -= 1
            return None
        if self._current is None:
            if not self._waiting:
                return None
            order = self._waiting.popleft()
            self._current = order, self._start(order, self._pace)
        order, blend = self._current
        self._pace.begin(budget_s, idle=idle)
        outcome: BlendReport | Exception
        try:
            next(blend)
            return None  # it has paused
        except StopIteration as end:
            outcome = end.value
        except Exception as error:  # whatever it is, the engine's own prefill gives the right answer
            outcome = error
        self._current, self._held = None, _HELD_STEPS
        return Finished(order, outcome)

    def stop(self, store: str) -> None:
        """Have an order that was begun fail, because its store closes. The engine prefills it."""
        if self._current and self._current[0].recipe.store == store:
            order, blend = self._current
            blend.close()
            self._current = order, _stopped()

    def cancel(self, ended: Collection[str]) -> list[BlendOrder]:
        """Forget the orders of requests, begun or not; those that were forgotten."""
        gone = [order for order in self._waiting if order.request_id in ended]
        self._waiting = deque(order for order in self._waiting if order.request_id not in ended)
        if self._current and self._current[0].request_id in ended:
            order, blend = self._current
            blend.close()
            self._current = None
            gone.append(order)
        return gone


def _stopped() -> Sliced:
    raise RuntimeError("its store was closed")
    yield
