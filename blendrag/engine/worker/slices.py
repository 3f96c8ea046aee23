"""Long blends in slices: while other requests decode, blending takes only a share of each engine step.

A fused prefill of seconds inside one step would hold back the next token of every running answer for as long
(head-of-line blocking). The share bounds that: with one half, a token takes at most about twice its time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable
from concurrent.futures import Executor
from statistics import median
from typing import Any, TypeVar

from blendrag.engine.recipe import BlendOrder
from blendrag.engine.report import BlendReport
from blendrag.engine.worker.ranks import ALONE, Ranks

_KEPT_STEPS = 8
_FEWEST_ROWS, _MOST_ROWS, _FIRST_ROWS = 32, 8192, 128
_PIECES = 3  # a slice is made of at least about so many: what it overshoots by is less than one

T = TypeVar("T")


class Pace:
    """When a fused prefill pauses, and how many rows of a layer it computes before it asks again.

    ``rows``: None while nothing has to be waited for: whole layers. Of several ranks, the owner's clock
    counts.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.rows: int | None = None
        self._budget_s, self._end, self._asked = 0.0, 0.0, 0.0
        self._learnt = _FIRST_ROWS

    def begin(self, budget_s: float | None) -> None:
        """A slice of so many seconds begins now; None: one without an end."""
        self.rows = None if budget_s is None else self._learnt
        self._budget_s = budget_s or 0.0
        self._asked = time.perf_counter()
        self._end = self._asked + self._budget_s

    @property
    def over(self) -> bool:
        """Whether the slice has ended."""
        return self.rows is not None and self.ranks.choose(time.perf_counter() > self._end)

    def pause(self, rows: int) -> bool:
        """Asked after each piece of so many ``rows``: whether another one would overshoot the slice."""
        if self.rows is None:
            return False
        now = time.perf_counter()
        taken, self._asked = now - self._asked, now
        fitting = int(rows * self._budget_s / _PIECES / max(taken, 1e-6))
        learnt = max(_FEWEST_ROWS, min(fitting, 2 * self._learnt, _MOST_ROWS))
        self._learnt, pauses = self.ranks.choose((learnt, now + taken > self._end))
        self.rows = self._learnt
        return pauses


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
        """Seconds that make blending ``share`` of a step."""
        step = median(self._took) if self._took else 0.0
        return step * share / (1.0 - share)


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
    """Have a thread do what may wait for a disk, a server or a lock, with pauses until it is done; at once,
    where no pause is allowed. undo: for a result that nobody waits for any more."""
    if pace.rows is None:
        return work()
    done = thread.submit(work)
    try:
        while pace.rows is not None and not pace.ranks.all(done.done()):
            yield
    except GeneratorExit:
        done.add_done_callback(lambda late: None if late.exception() else undo(late.result()))
        raise
    return done.result()


class BlendQueue:
    """Orders in the order of their arrival: the first is finished before the second begins, so that it has
    its first token soonest and one request's stored KV is in flight at a time."""

    def __init__(self, start: Callable[[BlendOrder, Pace], Sliced], ranks: Ranks = ALONE) -> None:
        self._start, self._pace = start, Pace(ranks)
        self._waiting: deque[BlendOrder] = deque()
        self._current: tuple[BlendOrder, Sliced] | None = None

    def __bool__(self) -> bool:
        return bool(self._current or self._waiting)

    def add(self, orders: Iterable[BlendOrder]) -> None:
        self._waiting.extend(orders)

    def run(self, budget_s: float | None) -> list[tuple[BlendOrder, BlendReport | Exception]]:
        """Sliced for about so many seconds (None: until one is finished, so that it gets its first token);
        what was finished, or failed, in it.

        An order that does not wait is needed by the step at hand: it is done, whatever it takes.
        """
        urgent = any(not order.waits for order in self._waiting)
        self._pace.begin(None if urgent else budget_s)
        done: list[tuple[BlendOrder, BlendReport | Exception]] = []
        while self:
            if self._current is None:
                order = next((order for order in self._waiting if not order.waits), self._waiting[0])
                self._waiting.remove(order)
                self._current = order, self._start(order, self._pace)
            order, blend = self._current
            try:
                next(blend)
                return done  # it has paused
            except StopIteration as end:
                done.append((order, end.value))
            except Exception as error:  # whatever it is, the engine's own prefill gives the right answer
                done.append((order, error))
            self._current = None
            if any(not order.waits for order in self._waiting):
                continue
            if urgent or budget_s is None or self._pace.over:
                break
        return done

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
