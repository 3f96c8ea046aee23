"""Slices: who is blended when, and for how long, without an engine."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from blendrag.engine.recipe import BlendOrder, Recipe
from blendrag.engine.worker.slices import BlendQueue, Pace, Sliced, StepClock

PIECE_S = 0.002


def order(name: str, *, waits: bool = True) -> BlendOrder:
    return BlendOrder(name, name, [1, 2], [0], 0, Recipe("store", (("key", 0, 2),)), waits)


class Work:
    """Blends of so many pieces each; what was done, in order."""

    def __init__(self, pieces: int = 6) -> None:
        self.pieces, self.log, self.left = pieces, list[str](), list[str]()
        self.rows: list[int | None] = []

    def start(self, order: BlendOrder, pace: Pace) -> Sliced:
        try:
            for _ in range(self.pieces):
                time.sleep(PIECE_S)
                self.log.append(order.request_id)
                self.rows.append(pace.rows)
                if order.request_id == "broken":
                    raise RuntimeError("broken")
                if pace.pause(pace.rows or 1):
                    yield
            return {"done": order.request_id}
        finally:
            self.left.append(order.request_id)


def finished(queue: BlendQueue, budget_s: float | None) -> list[str]:
    return [order.request_id for order, _ in queue.run(budget_s)]


@pytest.fixture
def work() -> Work:
    return Work()


def test_slice_takes_as_long_as_the_whole_blend(work: Work) -> None:
    queue = BlendQueue(work.start)
    queue.add([order("a")])
    assert finished(queue, PIECE_S) == []
    assert 1 <= len(work.log) < work.pieces
    assert queue


def test_first_blend_waits_for_its_token_until_all_others_are_done(work: Work) -> None:
    queue = BlendQueue(work.start)
    queue.add([order("a"), order("b")])
    assert finished(queue, None) == ["a"]
    assert finished(queue, None) == ["b"]
    assert not queue
    assert set(work.rows) == {None}  # whole layers


def test_budget_that_is_too_small_for_a_piece_stops_all_progress(work: Work) -> None:
    queue = BlendQueue(work.start)
    queue.add([order("a")])
    done: list[str] = []
    for _ in range(work.pieces + 1):
        done += finished(queue, 0.0)
    assert done == ["a"]


def test_second_order_is_begun_before_the_first_has_its_token(work: Work) -> None:
    queue = BlendQueue(work.start)
    queue.add([order("a"), order("b")])
    while queue:
        queue.run(PIECE_S)
    assert work.log == ["a"] * work.pieces + ["b"] * work.pieces


def test_order_that_the_step_needs_is_put_off(work: Work) -> None:
    queue = BlendQueue(work.start)
    queue.add([order("a")])
    assert finished(queue, PIECE_S) == []
    queue.add([order("b"), order("now", waits=False)])
    assert finished(queue, PIECE_S) == ["a", "now"]  # what was begun has the loader's buffers
    assert finished(queue, None) == ["b"]


def test_failing_blend_takes_the_next_one_along(work: Work) -> None:
    queue = BlendQueue(work.start)
    queue.add([order("broken"), order("b")])
    ((_, broken),), ((_, done),) = queue.run(None), queue.run(None)
    assert isinstance(broken, RuntimeError)
    assert done == {"done": "b"}


def test_cancelled_blend_keeps_what_it_opened(work: Work) -> None:
    queue = BlendQueue(work.start)
    queue.add([order("a"), order("b"), order("c")])
    queue.run(0.0)
    gone = queue.cancel({"a", "b"})
    assert {one.request_id for one in gone} == {"a", "b"}
    assert work.left == ["a"]  # b was not begun
    assert finished(queue, None) == ["c"]


def test_stopped_blend_is_never_heard_of_again(work: Work) -> None:
    queue = BlendQueue(work.start)
    queue.add([order("a")])
    queue.run(0.0)
    queue.stop("another store")
    assert not work.left
    queue.stop("store")
    assert work.left == ["a"]
    ((one, outcome),) = queue.run(0.0)
    assert one.request_id == "a" and isinstance(outcome, RuntimeError)
    assert not queue


def steps(pace: Pace, budget_s: float, rows_per_s: float) -> Iterator[int]:
    """Rows of the pieces of one slice, on a machine that computes so many per second."""
    pace.begin(budget_s)
    while True:
        assert pace.rows is not None
        rows = pace.rows
        time.sleep(rows / rows_per_s)
        yield rows
        if pace.pause(rows):
            return


@pytest.mark.parametrize("rows_per_s", [5_000.0, 200_000.0])
def test_pieces_stay_too_large_or_too_small_for_the_machine(rows_per_s: float) -> None:
    pace, budget_s = Pace(), 0.04
    for _ in range(8):
        rows = list(steps(pace, budget_s, rows_per_s))
    assert max(rows) <= budget_s * rows_per_s  # none is longer than the slice
    assert sum(rows) >= 0.1 * budget_s * rows_per_s  # and most of the slice is used, on a busy machine too


def test_idle_time_counts_as_the_engines_step() -> None:
    clock = StepClock()
    assert clock.slice_s(0.5) == 0.0
    for _ in range(4):
        clock.leave()
        time.sleep(0.002)
        clock.enter(follows=True)
    clock.leave()
    time.sleep(0.2)
    clock.enter(follows=False)
    assert 0.0 < clock.slice_s(0.5) < 0.1
    assert clock.slice_s(0.25) < clock.slice_s(0.5)
