"""Which waiting request begins, as a scheduler asks that goes through them from the oldest on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from blendrag.engine.worker.reordering import Reordering

Sizes = tuple[int, int]  # cached, prompt
SIZES = st.tuples(st.integers(0, 50), st.integers(1, 50)).map(lambda two: (two[0], two[0] + two[1]))


def step(order: Reordering, waiting: dict[str, Sizes], blocked: frozenset[str] = frozenset()) -> list[str]:
    """As the scheduler does: who may not begin is passed over until the next step."""
    begun = []
    for name in list(waiting):
        if name not in blocked and order.may_begin(name, 0):
            order.began(name)
            del waiting[name]
            begun.append(name)
    order.step_over()
    return begun


@given(st.lists(SIZES, min_size=1, max_size=12), st.integers(1, 4), st.data())
def test_request_starves_or_is_overtaken_more_often(
    sizes: list[Sizes], window: int, data: st.DataObject
) -> None:
    order, waiting, overtaken = Reordering(window), dict[str, Sizes](), dict[str, int]()
    coming = [(str(number), size) for number, size in enumerate(sizes)]
    for _ in range(3 * len(sizes)):
        for _ in range(min(len(coming), data.draw(st.integers(0, 3)))):
            name, size = coming.pop(0)
            waiting[name], overtaken[name] = size, 0
            order.arrived(name, *size)
        if not coming and not waiting:
            break
        before = list(waiting)
        begun = step(order, waiting)
        assert bool(begun) == bool(before), "the engine is idle though somebody waits"
        for name in begun:
            for older in before[: before.index(name)]:
                overtaken[older] += older in waiting
    assert max(overtaken.values(), default=0) <= window
    assert not waiting or coming or len(waiting) < len(sizes)


@given(st.lists(SIZES, min_size=1, max_size=10, unique=True))
def test_request_with_less_cached_for_what_it_computes_begins_first(sizes: list[Sizes]) -> None:
    order, waiting = Reordering(100), {str(number): size for number, size in enumerate(sizes)}
    for name, size in waiting.items():
        order.arrived(name, *size)
    ratios = [cached / (prompt - cached) for cached, prompt in sizes]
    step(order, waiting)
    begun = set(map(str, range(len(sizes)))) - waiting.keys()
    assert any(ratios[int(name)] == max(ratios) for name in begun)


def test_papers_examples_are_ordered_otherwise() -> None:
    order = Reordering(32)
    order.arrived("small", 1, 3)
    order.arrived("large", 2, 4)
    assert not order.may_begin("small", 0) and order.may_begin("large", 0)
    order.began("large")
    assert order.may_begin("small", 0)
    order = Reordering(32)
    order.arrived("long", 2, 5)
    order.arrived("short", 2, 3)
    assert not order.may_begin("long", 0) and order.may_begin("short", 0)


def test_what_the_engine_has_itself_does_not_count() -> None:
    order = Reordering(32)
    order.arrived("tree", 10, 20)
    order.arrived("pool", 0, 20)
    assert order.may_begin("tree", 0)
    assert order.may_begin("pool", 15) and not order.may_begin("tree", 0)


def test_lone_or_preempted_request_waits_or_all_wait_for_one_that_cannot_begin() -> None:
    order = Reordering(4)
    order.arrived("one", 0, 9)
    assert step(order, {"one": (0, 9)}) == ["one"]
    order.arrived("two", 0, 9)
    order.arrived("best", 8, 9)
    assert order.may_begin("one", 0), "it was preempted"
    waiting = {"two": (0, 9), "best": (8, 9)}
    assert step(order, waiting, blocked=frozenset({"best"})) == []
    assert step(order, waiting, blocked=frozenset({"best"})) == ["two"]
    order.ended("best")
    order.arrived("last", 0, 9)
    assert order.may_begin("last", 0), "the one before has gone"
