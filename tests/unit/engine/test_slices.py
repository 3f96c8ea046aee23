"""Slices: who is blended when, and for how long, without an engine."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from blendrag.engine.forward.slices import BlendQueue, Pace, Sliced, StepClock, in_thread
from blendrag.engine.jobs import Job, JobName, Jobs
from blendrag.engine.wire.recipe import BlendOrder, Recipe
from blendrag.engine.wire.report import BlendReport

PIECE_S = 0.002
NUMBERS = itertools.count()


def order(name: str) -> BlendOrder:
    return BlendOrder(name, name, [1, 2], [0], 0, Recipe("store", (("key", 0, 2),)))


class Work:
    """Blends of so many pieces each; what was done, in order."""

    def __init__(self, pieces: int = 6) -> None:
        self.pieces, self.log, self.left = pieces, list[str](), list[str]()

    def start(self, order: BlendOrder, pace: Pace) -> Sliced:
        try:
            for _ in range(self.pieces):
                time.sleep(PIECE_S)
                self.log.append(order.request_id)
                if order.request_id == "broken":
                    raise RuntimeError("broken")
                if pace.pause(pace.rows):
                    yield
            return BlendReport(selector=order.request_id)
        finally:
            self.left.append(order.request_id)
            if order.request_id == "stale":
                raise OSError("a stale file")


ENOUGH_S = 10.0


def finished(queue: BlendQueue, budget_s: float = ENOUGH_S, steps: int = 1) -> list[str]:
    """Whose blends end in so many steps, with a slice in each."""
    done = [queue.run(budget_s) for _ in range(steps)]
    return [one.order.request_id for one in done if one is not None]


def queued(*names: str) -> tuple[Work, BlendQueue]:
    work = Work()
    queue = BlendQueue(work.start)
    queue.add(map(order, names))
    return work, queue


def test_slice_ends_before_a_long_blend_does() -> None:
    work, queue = queued("a")
    assert finished(queue, PIECE_S) == []
    assert 1 <= len(work.log) < work.pieces
    assert queue


def test_first_token_leaves_before_the_next_blend_begins() -> None:
    work, queue = queued("a", "b")
    assert finished(queue) == ["a"]
    assert finished(queue, steps=3) == [] and "b" not in work.log
    assert finished(queue) == ["b"]
    assert not queue


def test_orders_are_blended_one_after_the_other() -> None:
    work, queue = queued("a", "b")
    while queue:
        queue.run(PIECE_S)
    assert work.log == ["a"] * work.pieces + ["b"] * work.pieces


def test_failing_blend_leaves_the_next_one_alone() -> None:
    _, queue = queued("broken", "b")
    broken = queue.run(ENOUGH_S)
    assert broken and isinstance(broken.outcome, RuntimeError)
    assert finished(queue, steps=4) == ["b"]


def test_cancelled_blend_gives_back_what_it_opened() -> None:
    work, queue = queued("a", "b", "c")
    queue.run(0.0)
    gone = queue.cancel({"a", "b"})
    assert {one.request_id for one in gone} == {"a", "b"}
    assert work.left == ["a"]  # b was not begun
    assert finished(queue) == ["c"]


def test_blend_that_cannot_give_back_what_it_opened_ends_no_engine() -> None:
    work, queue = queued("stale", "b")
    queue.run(0.0)
    assert [one.request_id for one in queue.cancel({"stale"})] == ["stale"] == work.left
    assert finished(queue) == ["b"]


def test_blend_fails_when_its_store_closes() -> None:
    work, queue = queued("a")
    queue.run(0.0)
    queue.stop("another store")
    assert not work.left
    queue.stop("store")
    assert work.left == ["a"]
    done = queue.run(0.0)
    assert done and done.order.request_id == "a" and isinstance(done.outcome, RuntimeError)
    assert not queue


def steps(pace: Pace, budget_s: float, rows_per_s: float) -> Iterator[int]:
    """Rows of the pieces of one slice, on a machine that computes so many per second."""
    pace.begin(budget_s)
    while True:
        rows = pace.rows
        time.sleep(rows / rows_per_s)
        yield rows
        if pace.pause(rows):
            return


@pytest.mark.parametrize("rows_per_s", [5_000.0, 200_000.0])
def test_pieces_fit_the_machine(rows_per_s: float) -> None:
    pace, budget_s = Pace(), 0.04
    for _ in range(8):
        rows = list(steps(pace, budget_s, rows_per_s))
    assert max(rows) <= budget_s * rows_per_s  # none is longer than the slice
    assert sum(rows) >= 0.1 * budget_s * rows_per_s  # and most of the slice is used, on a busy machine too


def test_idle_time_is_no_part_of_the_engines_step() -> None:
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


# -- long operations, between steps -----------------------------------------------------------------------


def job(pieces: int) -> Job:
    for _ in range(pieces):
        time.sleep(PIECE_S)
        yield
    return pieces


def step(clock: StepClock) -> None:
    """One of the engine's."""
    clock.leave()
    time.sleep(PIECE_S)
    clock.enter(follows=True)


def begun(jobs: Jobs, one: Job, client: str = "") -> JobName:
    name = client, next(NUMBERS)
    jobs.begin(name, one)
    return name


def slices(jobs: Jobs, name: JobName, clock: StepClock | None) -> int:
    """How many it takes to the end; clock: the engine takes a step between any two."""
    for count in range(1, 1000):
        if clock is not None:
            step(clock)
            clock.leave()
        ended, result = jobs.go_on(name)
        if ended:
            assert result == 30
            return count
    raise AssertionError("it never ends")


def test_ingest_lets_the_engines_steps_go_on() -> None:
    clock = StepClock()
    jobs = Jobs(clock, 0.5)
    assert slices(jobs, begun(jobs, job(30)), None) < 5, "nothing else is to be done"
    assert slices(jobs, begun(jobs, job(30)), clock) > 5
    assert slices(jobs, begun(jobs, job(30)), None) < 5
    unlimited = Jobs(clock, 1.0)
    assert slices(unlimited, begun(unlimited, job(30)), clock) == 1


def test_job_that_takes_over_from_another_is_not_alone_with_the_engine() -> None:
    clock = StepClock()
    jobs = Jobs(clock, 0.5)
    for _ in range(4):
        step(clock)
    clock.leave()
    jobs.go_on(begun(jobs, job(1)))
    assert jobs.go_on(begun(jobs, job(30))) == (False, None), "it has run to its end"


def test_slice_of_ingest_does_not_count_as_the_engines_step() -> None:
    clock = StepClock()
    jobs = Jobs(clock, 0.5)
    step(clock)
    alone = clock.slice_s(0.5)
    for _ in range(8):
        clock.leave()
        jobs.go_on(begun(jobs, job(20)))
        time.sleep(PIECE_S)
        clock.enter(follows=True)
    assert clock.slice_s(0.5) < 5 * alone


def test_slice_of_ingest_is_part_of_a_blends() -> None:
    clock = StepClock()
    for _ in range(4):
        step(clock)
        time.sleep(5 * PIECE_S)  # of the same step, a blend took as much as its share, and more
        clock.leave()
    jobs = Jobs(clock, 0.5)
    clock.enter(follows=True)
    time.sleep(5 * PIECE_S)
    clock.leave()
    begin = time.perf_counter()
    jobs.go_on(begun(jobs, job(30)))
    assert time.perf_counter() - begin < 4 * PIECE_S, "no more than one piece"


def test_waiting_for_a_disk_takes_up_no_slice() -> None:
    def waiting() -> Job:
        while True:
            yield True

    jobs = Jobs(StepClock(), 0.5)
    number = begun(jobs, waiting())
    begin = time.perf_counter()
    assert jobs.go_on(number) == (False, None)
    assert time.perf_counter() - begin < 0.1, "where an idle engine gives it 0.2 s"


def test_job_whose_client_gave_up_is_closed() -> None:
    left: list[str] = []

    def endless() -> Job:
        try:
            while True:
                yield True
        finally:
            left.append("closed")

    jobs = Jobs(StepClock(), 0.5)
    jobs.go_on(begun(jobs, endless()))
    slices(jobs, begun(jobs, job(30)), None)
    assert left == ["closed"] and not jobs._begun


def test_job_of_one_client_leaves_anothers_alone() -> None:
    jobs = Jobs(StepClock(), 0.5)
    ours, theirs = begun(jobs, job(9), "ours"), begun(jobs, job(9), "theirs")
    ended = set[JobName]()
    for number in (ours, theirs) * 20:
        if number not in ended and jobs.go_on(number)[0]:
            ended.add(number)
    assert ended == {ours, theirs}


def test_job_that_fails_is_dropped() -> None:
    def broken() -> Job:
        yield
        raise ValueError("broken")

    jobs = Jobs(StepClock(), 0.5)
    number = begun(jobs, broken())
    with pytest.raises(ValueError, match="broken"):
        while True:
            jobs.go_on(number)
    assert not jobs._begun


# -- what another thread waits for ------------------------------------------------------------------------


def test_blend_pauses_while_a_server_answers_another_thread() -> None:
    answer, pace, undone = threading.Event(), Pace(), list[int]()

    def slow() -> int:
        answer.wait(10)
        return 1

    with ThreadPoolExecutor(1) as thread:
        pace.begin(PIECE_S)
        waiting = in_thread(thread, pace, slow, undone.append)
        begin = time.perf_counter()
        next(waiting)
        assert time.perf_counter() - begin < 50 * PIECE_S, "beside answers nobody waits"
        pace.begin(100 * PIECE_S, idle=True)
        next(waiting)
        assert time.perf_counter() - begin > 50 * PIECE_S, "an idle engine would ask again at once"
        given_up = in_thread(thread, pace, slow, undone.append)
        next(given_up)
        given_up.close()
        answer.set()
        with pytest.raises(StopIteration) as end:
            while True:
                next(waiting)
        assert end.value.value == 1
    assert undone == [1], "what was opened for a request that gave up stays open"
