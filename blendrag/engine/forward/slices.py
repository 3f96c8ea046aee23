"""Blends run in slices, one per engine step, so that no request waits for another one's blend to end.

While answers are generated, a slice is a share of the step: with one half, a token takes at most about twice
its time. In an engine that has nothing else to do, it is short enough not to delay the next request much.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable
from concurrent.futures import Executor, wait
from contextlib import suppress
from statistics import median
from typing import Any, NamedTuple, TypeVar

from blendrag.engine.forward.ranks import ALONE, Ranks
from blendrag.engine.wire.recipe import BlendOrder
from blendrag.engine.wire.report import BlendReport

IDLE_S = 0.1
"""Seconds of a slice while the engine computes nothing else: how long a new request may have to wait."""

# The steps without a blend after one has ended, so that its request's first token leaves before others' work.
# Where steps are scheduled ahead, the scheduler hears of it in the first step, the token is computed in the
# second, and leaves while the third one runs.
_HELD_STEPS = 3

_KEPT_STEPS = 8
_MIN_ROWS, _MAX_ROWS, _FIRST_ROWS = 32, 4096, 128
_PIECES = 3  # while answers are generated, about so many pieces make a slice; it overshoots by less than one

T = TypeVar("T")


class Pace:
    """The pace of a blend: when it pauses, how many rows of a layer it computes before it asks, and how long
    it may wait for another thread. Of several ranks, the owner's clock counts."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self._rows = _FIRST_ROWS  # while answers are generated
        self._piece_s = self._end = self._asked = 0.0
        self._idle = True

    @property
    def rows(self) -> int:
        """Return how many rows a piece of a layer has at most. While the engine has nothing else to do, that
        does not depend on the clock: results of other pieces may be rounded differently."""
        return _MAX_ROWS if self._idle else self._rows

    def begin(self, budget_s: float, *, idle: bool = False) -> None:
        """Begin a slice of so many seconds. idle: the engine has nothing else to do."""
        self._asked = time.perf_counter()
        self._end = self._asked + budget_s
        self._piece_s = budget_s / _PIECES
        self._idle = idle

    def pause(self, rows: int) -> bool:
        """Return whether to pause after a piece of so many rows: another would overshoot the slice."""
        now = time.perf_counter()
        taken, self._asked = now - self._asked, now
        fitting = int(min(rows * self._piece_s / max(taken, 1e-6), _MAX_ROWS))
        learnt = max(_MIN_ROWS, min(fitting, 2 * self._rows))
        self._rows, pauses = self.ranks.choose((learnt, now + taken > self._end))
        return pauses

    def arrived(self, ready: Callable[[float], bool]) -> bool:
        """Return whether the result of another thread is there on all ranks. ``ready`` is told how many
        seconds it may wait for it: none while answers are generated."""
        left = max(0.0, self._end - time.perf_counter()) if self._idle else 0.0
        there = ready(left)
        self._asked = time.perf_counter()
        return self.ranks.all(there)


class StepClock:
    """A clock of the engine's own part of a step, from one slice's end to the next one's beginning."""

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._left = self._entered = 0.0
        self.steps = 0
        self.blended_s = 0.0
        """The seconds that the last slice took."""

    def enter(self, *, follows: bool) -> None:
        """Note that the engine's part has ended. follows: whether there was nothing else since the last
        slice."""
        self.steps += 1
        self._entered = time.perf_counter()
        if follows and self._left:
            self._took.append(self._entered - self._left)

    def leave(self) -> None:
        """Note that our part has ended."""
        self._left = time.perf_counter()
        self.blended_s = self._left - self._entered

    def aside(self, seconds: float) -> None:
        """Leave out seconds in which the engine did something else, between two of its steps."""
        if self._left:
            self._left += seconds

    def slice_s(self, share: float) -> float:
        """Return the seconds that make blending ``share`` of a step; with 1, as long as it takes."""
        step = median(self._took) if self._took else 0.0
        return step * share / (1.0 - share) if share < 1 else float("inf")


# A blend, which pauses between its slices.
Sliced = Generator[None, None, BlendReport]


def exhaust(work: Generator[Any, None, T]) -> T:
    """Run all of it, without a pause."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def in_thread(
    thread: Executor, pace: Pace, work: Callable[[], T], undo: Callable[[T], None] = lambda _: None
) -> Generator[None, None, T]:
    """Have a thread do work that may wait for a disk, a server or a lock, and pause until it is done.

    undo: is called with a result that nobody waits for any more.
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
    """An order that was carried out: its report, or what was raised. None: nobody waits for it any more."""

    order: Any
    outcome: BlendReport | Exception | None


class BlendQueue:
    """The queue of blends. The first is finished before the second begins, so that it has its first token
    soonest and only one request's stored KV is in flight."""

    def __init__(self, start: Callable[[BlendOrder, Pace], Sliced], ranks: Ranks = ALONE) -> None:
        self._start, self._pace = start, Pace(ranks)
        self._waiting: deque[BlendOrder] = deque()
        self._current: tuple[BlendOrder, Sliced] | None = None
        self._held = 0  # in steps

    def __bool__(self) -> bool:
        return bool(self._current or self._waiting)

    def add(self, orders: Iterable[BlendOrder]) -> None:
        self._waiting.extend(orders)

    def run(self, budget_s: float, *, idle: bool = False) -> Finished | None:
        """Run one blend for about so many seconds. Returns it if it has ended."""
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
        except Exception as error:  # whatever the error is, the engine's own prefill gives the right answer
            outcome = error
        self._current, self._held = None, _HELD_STEPS
        return Finished(order, outcome)

    def stop(self, store: str) -> None:
        """Make an order that was begun fail, because its store closes. The engine prefills it."""
        if self._current and self._current[0].recipe.store == store:
            order, blend = self._current
            _end(blend)
            self._current = order, _stopped()

    def cancel(self, ended: Collection[str]) -> list[BlendOrder]:
        """Forget the orders of requests, begun or not, and return those that were forgotten."""
        gone = [order for order in self._waiting if order.request_id in ended]
        self._waiting = deque(order for order in self._waiting if order.request_id not in ended)
        if self._current and self._current[0].request_id in ended:
            order, blend = self._current
            _end(blend)
            self._current = None
            gone.append(order)
        return gone


def _end(blend: Sliced) -> None:
    """End a blend that nobody waits for. What giving something back raises must not end the engine."""
    with suppress(Exception):
        blend.close()


def _stopped() -> Sliced:
    raise RuntimeError("its store was closed")
    yield
