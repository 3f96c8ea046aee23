"""Which waiting request begins, as a scheduler asks that goes through them from the oldest on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from blendrag.engine.compat.connector import SchedulerStep
from blendrag.engine.compat.requests import SamplingParams
from blendrag.engine.hooks import Asked
from blendrag.engine.prefixes.reordering import ReorderedClaims, _Waiting
from blendrag.engine.wire.prefixes import PrefixPath
from blendrag.engine.wire.recipe import Recipe
from blendrag.settings import Settings
from connector_halves import BLOCKS, PROMPT, asked, engine_config

Sizes = tuple[int, int]  # cached, prompt
SIZES = st.tuples(st.integers(0, 50), st.integers(1, 50)).map(lambda two: (two[0], two[0] + two[1]))


class Order(ReorderedClaims):
    """Asked about requests by their names."""

    def __init__(self, window: int) -> None:
        super().__init__(window)
        self.known: dict[str, Asked] = {}

    def come(self, name: str, cached: int, prompt: int) -> None:
        """One arrives, of whose prompt the tree has so much."""
        path = PrefixPath("tree", (("node", cached),), 1, 1).transfer_params("") if cached else None
        self.known[name] = asked(path, prompt, name=name)
        self.arrived(self.known[name])

    def may_begin(self, name: str, computed: int = 0) -> bool:
        return self.claim(self.known[name], computed) is not None

    def begin(self, name: str) -> None:
        self.allocated(self.known[name], [], 0)

    def step(self, waiting: dict[str, Sizes], blocked: str = "") -> list[str]:
        """As the scheduler does: who may not begin is passed over until the next step."""
        begun = []
        for name in list(waiting):
            if name != blocked and self.may_begin(name):
                self.begin(name)
                del waiting[name]
                begun.append(name)
        self.orders(SchedulerStep(None))
        return begun


@given(st.lists(SIZES, min_size=1, max_size=12), st.integers(1, 4), st.data())
def test_no_request_starves_or_is_overtaken_more_often_than_the_window(
    sizes: list[Sizes], window: int, data: st.DataObject
) -> None:
    order, waiting, overtaken = Order(window), dict[str, Sizes](), dict[str, int]()
    coming = [(str(number), size) for number, size in enumerate(sizes)]
    for _ in range(3 * len(sizes)):
        for _ in range(min(len(coming), data.draw(st.integers(0, 3)))):
            name, size = coming.pop(0)
            waiting[name], overtaken[name] = size, 0
            order.come(name, *size)
        if not coming and not waiting:
            break
        before = list(waiting)
        begun = order.step(waiting)
        assert bool(begun) == bool(before), "the engine is idle though somebody waits"
        for name in begun:
            for older in before[: before.index(name)]:
                overtaken[older] += older in waiting
    assert max(overtaken.values(), default=0) <= window
    assert not waiting or coming or len(waiting) < len(sizes)


@given(st.lists(SIZES, min_size=1, max_size=10, unique=True))
def test_request_with_most_cached_for_what_it_computes_begins_first(sizes: list[Sizes]) -> None:
    order, waiting = Order(100), {str(number): size for number, size in enumerate(sizes)}
    for name, size in waiting.items():
        order.come(name, *size)
    ratios = [cached / (prompt - cached) for cached, prompt in sizes]
    order.step(waiting)
    begun = set(map(str, range(len(sizes)))) - waiting.keys()
    assert any(ratios[int(name)] == max(ratios) for name in begun)


@given(st.lists(st.tuples(st.sampled_from(["arrive", "ask", "begin", "end"]), SIZES), max_size=40))
def test_priority_that_has_changed_counts_as_it_is_now(calls: list[tuple[str, Sizes]]) -> None:
    order, waiting = Order(1000), dict[str, Sizes]()
    for number, (call, (cached, prompt)) in enumerate(calls):
        if call == "arrive" or not waiting:
            waiting[str(number)] = cached, prompt
            order.come(str(number), cached, prompt)
            continue
        name = list(waiting)[cached % len(waiting)]
        if call == "ask":
            before, length = waiting[name]
            waiting[name] = max(before, min(cached, length - 1)), length
            best = max(waiting, key=lambda one: waiting[one][0] / (waiting[one][1] - waiting[one][0]))
            assert order.may_begin(name, waiting[name][0]) == (name == best)
        else:
            (order.begin if call == "begin" else order.finished)(name)
            del waiting[name]


def test_step_does_not_compare_each_of_many_waiting_requests_with_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared, priority = 0, _Waiting.priority.fget
    assert priority is not None

    def counted(self: _Waiting) -> tuple[float, int]:
        nonlocal compared
        compared += 1
        return priority(self)

    monkeypatch.setattr(_Waiting, "priority", property(counted))
    order, waiting = Order(32), {str(number): (number % 7, 20) for number in range(300)}
    for name, size in waiting.items():
        order.come(name, *size)
    assert order.step(waiting, blocked="6") == []
    assert 0 < compared <= 3 * len(waiting)


def test_papers_examples_are_ordered_as_in_the_paper() -> None:
    order = Order(32)
    order.come("small", 1, 3)
    order.come("large", 2, 4)
    assert not order.may_begin("small") and order.may_begin("large")
    order.begin("large")
    assert order.may_begin("small")
    order = Order(32)
    order.come("long", 2, 5)
    order.come("short", 2, 3)
    assert not order.may_begin("long") and order.may_begin("short")


def test_blended_prompt_does_not_hold_those_behind_it() -> None:
    order = Order(32)
    order.arrived(asked(None, 20, Recipe("store", ()), name="blended"))
    order.come("plain", 0, 20)
    assert order.may_begin("plain")


def test_what_the_engine_has_itself_counts() -> None:
    order = Order(32)
    order.come("tree", 10, 20)
    order.come("pool", 0, 20)
    assert order.may_begin("tree")
    assert order.may_begin("pool", 15) and not order.may_begin("tree")


def test_lone_or_preempted_request_begins_and_none_waits_for_one_that_cannot() -> None:
    order = Order(4)
    order.come("one", 0, 9)
    assert order.step({"one": (0, 9)}) == ["one"]
    order.come("two", 0, 9)
    order.come("best", 8, 9)
    assert order.may_begin("one"), "it was preempted"
    waiting = {"two": (0, 9), "best": (8, 9)}
    assert order.step(waiting, blocked="best") == []
    assert order.step(waiting, blocked="best") == ["two"]
    order.finished("best")
    order.come("last", 0, 9)
    assert order.may_begin("last"), "the one before has gone"


# -- under vLLM's own scheduler ---------------------------------------------------------------------------

HELD = {"nothing": 0, "some": 100, "more": 200, "most": 290}


def begun(model_dir: Path, window: int, names: Sequence[str]) -> list[str]:
    """In which order requests begin that wait together, one to a step, of whose prompts so much is held."""
    order = f"retrieved:window={window}" if window else "retrieved"
    config = engine_config(model_dir, Settings.load(order=order), asynchronous=False, max_num_seqs=1)
    scheduler = Scheduler(config, BLOCKS, StructuredOutputManager(config), block_size=128)
    for name in names:
        path = PrefixPath("tree", ((name, HELD[name]),), 1, 1) if HELD[name] else None
        extra = {"kv_transfer_params": path.transfer_params("ticket")} if path else {}
        params = SamplingParams(max_tokens=2, ignore_eos=True, extra_args=extra)
        params.update_from_generation_config({}, 1)
        scheduler.add_request(Request(name, list(range(PROMPT)), params, None))
    order: list[str] = []
    for _ in range(20 * len(names)):
        scheduled = scheduler.schedule()
        ids = list(scheduled.num_scheduled_tokens)
        metadata: Any = scheduled.kv_connector_metadata
        loaded = [load.request_id for load in metadata.of("prefixes").claims if load.token_ids]
        order += [new.req_id for new in scheduled.scheduled_new_reqs if new.req_id not in order] + loaded
        there = KVConnectorOutput(finished_recving=set(loaded))
        numbers = {id: at for at, id in enumerate(ids)}
        output = ModelRunnerOutput(ids, numbers, [[7]] * len(ids), kv_connector_output=there)
        scheduler.update_from_output(scheduled, output)
        if not scheduler.has_requests():
            return order
    raise AssertionError(f"requests wait for ever; begun: {order}")


@pytest.mark.parametrize(
    ("window", "order"),
    [
        (0, ["nothing", "some", "most", "more"]),
        (32, ["most", "more", "some", "nothing"]),
        (1, ["most", "nothing", "some", "more"]),
        (2, ["most", "more", "nothing", "some"]),
    ],
)
def test_scheduler_takes_requests_in_this_order(model_dir: Path, window: int, order: list[str]) -> None:
    assert begun(model_dir, window, ["nothing", "some", "most", "more"]) == order


def test_scheduler_takes_a_lone_request(model_dir: Path) -> None:
    assert begun(model_dir, 4, ["nothing"]) == ["nothing"]
