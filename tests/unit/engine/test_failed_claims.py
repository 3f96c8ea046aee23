"""A claimed blend that fails, under asynchronous scheduling: vLLM's own scheduler, both halves of the
connector, and a runner that counts as vLLM's second one does."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from blendrag.control.guard import LoadGuard
from blendrag.engine.compat import connector as scheduling
from blendrag.engine.compat.connector import KVConnectorRole
from blendrag.engine.forward.slices import Pace, Sliced
from blendrag.engine.prefixes.exact_prefixes import ExactPrefixes
from blendrag.engine.wire.prefixes import PrefixPath
from blendrag.engine.wire.recipe import BlendOrder, Recipe
from blendrag.engine.wire.report import BlendReport, Tally
from blendrag.engine.worker import connector
from blendrag.engine.worker.connector import BlendConnector, GroupsConnector
from blendrag.engine.worker.metrics import merge
from blendrag.errors import StoreError
from blendrag.settings import Settings
from blendrag.store.tiers import RamTier, TierSpec
from stores import LAYOUT
from tests.helpers.connector_halves import (
    BLOCKS,
    GROUPS,
    PROMPT,
    WINDOWED,
    Runner,
    SchedulerHalf,
    engine_config,
    needs_groups,
    plane,
    request_of,
    vllm_request,
)

ANSWER = 6
KINDS = [
    pytest.param(BLOCKS, id="one group"),
    pytest.param(GROUPS, id="two", marks=needs_groups),
    pytest.param(WINDOWED, id="windows", marks=needs_groups),
]
AHEAD = 2  # steps that are scheduled before the first one's tokens are known


@pytest.fixture(scope="module")
def config(model_dir: Path) -> Any:
    """Of an engine that schedules asynchronously."""
    return engine_config(model_dir, Settings.load(blend_share=1.0))


RECIPE = Recipe("store", (("chunk", 4, 200),)).transfer_params("ticket")


def request(params: Any = RECIPE, **more: Any) -> Request:
    return vllm_request("one", params, max_tokens=ANSWER, **more)


def answer(
    config: Any, blend: Any, blocks: KVCacheConfig = BLOCKS, guard: LoadGuard | None = None, **more: Any
) -> tuple[list[int], dict[str, Any]]:
    """The tokens of a request whose blend does this, and what the engine says of it. guard: the worker's.
    more: sampling parameters."""
    scheduler = AsyncScheduler(config, blocks, StructuredOutputManager(config), block_size=128)
    runner = Runner(GroupsConnector(config, KVConnectorRole.WORKER, blocks))

    def start(order: BlendOrder, pace: Pace) -> Sliced:
        report = yield from blend(pace)
        end = report.prefix + report.exact if report.fallback else len(order.token_ids)
        runner.there[order.request_id] = set(range(end))
        return report

    runner.connector.bind(plane(start, guard=guard))
    scheduler.add_request(request(**more))
    steps: deque[tuple[Any, ModelRunnerOutput]] = deque()
    tokens: list[int] = []
    said: dict[str, Any] = {}
    for _ in range(100):
        scheduled = scheduler.schedule()
        steps.append((scheduled, runner.step(scheduled)))
        if len(steps) < AHEAD and scheduled.total_num_scheduled_tokens:
            continue
        for outputs in scheduler.update_from_output(*steps.popleft()).values():
            for output in outputs.outputs:
                tokens += output.new_token_ids
                said = output.kv_transfer_params or said
        if not scheduler.has_requests():
            return tokens, said
    raise AssertionError(f"it does not end; so far {tokens}")


def succeeds(pace: Pace) -> Sliced:
    if pace.pause(1):
        yield
    return BlendReport(cached=200, ms=dict.fromkeys(("load", "select", "recompute"), 1.0))


def fails_at_once(pace: Pace) -> Sliced:
    raise KeyError("no such store")


def fails_in_a_layer(pace: Pace) -> Sliced:
    if pace.pause(1):
        yield
    raise MemoryError("out of memory")


def is_refused(pace: Pace) -> Sliced:
    """Behind an exact prefix that was loaded before."""
    if pace.pause(1):
        yield
    return replace(BlendReport.refused("loading is slow", 130), prefix=0, exact=130)


RIGHT = [*range(PROMPT, PROMPT + ANSWER)]


@pytest.mark.parametrize("blocks", KINDS)
@pytest.mark.parametrize(
    ("blend", "expected"),
    [
        (succeeds, {"cached": 200, "cause": None}),
        (fails_at_once, {"cause": "error"}),
        (fails_in_a_layer, {"cause": "memory"}),
        (is_refused, {"cause": "loading", "exact": 130}),  # it is prefilled behind what is there
    ],
)
def test_blend_neither_loses_nor_invents_a_token_however_it_ends(
    config: Any, blend: Any, expected: dict[str, Any], blocks: KVCacheConfig
) -> None:
    tokens, said = answer(config, blend, blocks)
    assert tokens == RIGHT
    assert said["blendrag"].items() >= expected.items()
    assert bool(said["blendrag"]["fallback"]) == bool(expected["cause"])


@pytest.mark.parametrize(
    ("blend", "more", "plain"),
    [
        (succeeds, {}, PROMPT - 200),
        (fails_at_once, {}, PROMPT),
        (is_refused, {}, PROMPT - 130),
        (succeeds, {"params": None}, PROMPT),
    ],
)
def test_tokens_that_the_engine_prefills_itself_are_counted(
    config: Any, monkeypatch: pytest.MonkeyPatch, blend: Any, more: dict[str, Any], plain: int
) -> None:
    counted: Tally = {}
    monkeypatch.setattr(connector, "merge", lambda _, tally: merge(counted, tally))
    answer(config, blend, **more)
    assert counted["blendrag_tokens"]["plain"] == plain
    assert sum(counted["blendrag_tokens"].values()) == PROMPT


@pytest.mark.parametrize(("preempted", "more", "plain"), [(False, {}, 0), (True, {"params": None}, PROMPT)])
def test_tokens_are_counted_as_the_engines_only_if_it_has_computed_them(
    config: Any, preempted: bool, more: dict[str, Any], plain: int
) -> None:
    """Not of a blend that still runs when its request ends, but also those a preempted one finds again."""
    scheduler, one = SchedulerHalf(config), request(**more)
    scheduler.begins(one)
    one.num_computed_tokens = PROMPT
    if preempted:
        one.num_preemptions = 1
        scheduler.get_num_new_matched_tokens(one, 256)
    scheduler.request_finished(one, [1, 2, 3])
    stats = scheduler.get_kv_connector_stats()
    assert (stats.data["blendrag_tokens"]["plain"] if stats else 0) == plain


@pytest.mark.parametrize("params", ["text", ["a", "list"], 7.5])
def test_parameters_of_a_wrong_kind_do_not_end_the_engine(config: Any, params: Any) -> None:
    """vLLM's own scheduler looks into them behind us."""
    tokens, said = answer(config, succeeds, params=params)
    assert tokens == RIGHT and said["blendrag"]["cause"] == "recipe"


def test_answer_says_why_a_prompt_whose_log_probabilities_are_asked_for_is_not_blended(config: Any) -> None:
    """vLLM computes all of it, whatever is claimed."""
    tokens, said = answer(config, succeeds, prompt_logprobs=1)
    assert tokens == RIGHT and "prompt_logprobs" in said["blendrag"]["fallback"]


@pytest.mark.parametrize(("blend", "timed"), [(succeeds, False), (is_refused, False), (fails_at_once, True)])
def test_guard_hears_of_prefills_of_the_engine_that_are_long_enough(
    config: Any, blend: Any, timed: bool
) -> None:
    guard, slow = LoadGuard(), RamTier(TierSpec(kind="ram"), LAYOUT)
    for _ in range(3):
        guard.loaded(slow, 300, 3000.0)
    answer(config, blend, guard=guard)
    assert bool(guard.refuses({slow: 300}, 300)) == timed


def test_blend_is_claimed_asynchronously_and_leaves_a_cpu_its_last_rows(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, left in (("AVX512", 2), ("AVX2", 12), (None, 1)):  # they round a few rows otherwise than many
        monkeypatch.setattr(scheduling, "is_cpu", lambda kind=kind: kind is not None)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda kind=kind: kind)
        scheduler = SchedulerHalf(config)
        assert scheduler.get_num_new_matched_tokens(request(), 0) == (PROMPT - left, True)


def test_failed_prefix_is_stored_once_the_request_comes_again(config: Any) -> None:
    """As one does that waited for it: it is scheduled anew, with its blocks."""
    scheduler = SchedulerHalf(config)
    path = PrefixPath("tree", (("held", 200), ("next", 280)), 1, 2)
    one = request_of(path.transfer_params("ticket"), salt=None)
    assert scheduler.begins(one) == 200
    scheduler.hears("r", BlendReport.failed(RuntimeError("it is missing"), 0))
    assert scheduler.begins(one) == 0
    assert scheduler.step(r=PROMPT).of("prefixes").others == []


def test_report_of_a_request_that_has_ended_is_dropped(config: Any) -> None:
    """vLLM tells of the end first, of the same step's report after it."""
    scheduler = SchedulerHalf(config)
    one = request_of(RECIPE)
    assert scheduler.begins(one)
    one.num_computed_tokens = PROMPT
    scheduler.request_finished(one, [])
    scheduler.hears("r", BlendReport.failed(RuntimeError()))
    blends: Any = next(hook for hook in scheduler._hooks if hook.name == "blend")
    assert not scheduler._asked and not blends._blending
    stats = scheduler.get_kv_connector_stats()
    assert stats is not None and stats.data["blendrag_requests"] == {"fallback": 1}


def test_stream_of_a_prompt_that_the_scheduler_refuses_is_told_why(config: Any) -> None:
    """It asks a worker, which has never heard of the prompt."""
    scheduler = SchedulerHalf(config)
    worker = BlendConnector(config, KVConnectorRole.WORKER, BLOCKS)
    worker.bind(plane(lambda order, pace: succeeds(pace)))
    first, second = request(), request()
    second.request_id = "two"
    scheduler.begins(first)
    scheduler.hears("one", BlendReport.failed(MemoryError("none left")))
    assert scheduler.begins(second) == 0
    worker.bind_connector_metadata(scheduler.step())
    bound: Any = worker._data_plane
    report = bound.reports.get("ticket")
    assert report is not None and report.cause == "memory" and "just run out" in str(report.fallback)


@pytest.mark.parametrize("grows", [False, True])
def test_growth_is_not_counted_as_requests(config: Any, grows: bool) -> None:
    """What it loads, and what it computes; of others, both are."""
    scheduler = SchedulerHalf(config)
    for held in (1, 0):
        path = PrefixPath("tree", (("held", 200),), held, 1, grows).transfer_params("ticket")
        one = request_of(path, salt=None)
        claimed = scheduler.begins(one)
        assert claimed == 200 * held
        one.num_computed_tokens = PROMPT
        if claimed:
            scheduler.hears("r", BlendReport(exact=claimed))
        scheduler.request_finished(one, [1, 2, 3])
    stats = scheduler.get_kv_connector_stats()
    counted = stats.data["blendrag_requests"] if stats else {}
    assert counted == ({} if grows else {"exact": 1, "plain": 1})


def test_tree_is_refused_to_data_parallel_engines() -> None:
    nothing: Any = None
    reader = ExactPrefixes(nothing, "", nothing, nothing, owner=False)
    with pytest.raises(StoreError, match="data parallel"):
        reader.operations["open_tree"]("folder", {}, [])


PATH = PrefixPath("tree", (("node", 900),), 1, 1).transfer_params("ticket")
LONG_RECIPE = Recipe("store", (("chunk", 4, 800),)).transfer_params("ticket")


@pytest.mark.parametrize(("params", "salt"), [(PATH, None), (LONG_RECIPE, "tenant:0123")])
def test_next_prompt_finds_no_block_that_was_never_filled(
    model_dir: Path, params: dict[str, Any], salt: str | None
) -> None:
    """Of a request that ended before it had computed what could not be loaded."""
    config = engine_config(
        model_dir,
        Settings.load(),
        asynchronous=False,
        max_model_len=2048,
        max_num_batched_tokens=256,
        enable_prefix_caching=True,
    )
    init_none_hash(sha256)
    named = get_request_block_hasher(128, sha256)
    scheduler = Scheduler(config, BLOCKS, StructuredOutputManager(config), block_size=128)
    runner = Runner(BlendConnector(config, KVConnectorRole.WORKER, BLOCKS))

    def start(order: BlendOrder, pace: Pace) -> Sliced:
        yield from fails_at_once(pace)

    def load(order: Any) -> None:
        raise RuntimeError("it is missing")

    runner.connector.bind(plane(start, load=load))

    def add(name: str, params: dict[str, Any] | None) -> Request:
        made = vllm_request(name, params, 1000, cache_salt=salt, block_hasher=named)
        scheduler.add_request(made)
        return made

    def step() -> Any:
        scheduled = scheduler.schedule()
        output = runner.step(scheduled)
        output.sampled_token_ids = [[] for _ in output.req_ids]
        scheduler.update_from_output(scheduled, output)
        return scheduled

    one = add("one", params)
    assert not step().num_scheduled_tokens, "it fails"
    step()
    step()
    computed = one.num_computed_tokens
    assert 0 < computed < 800
    scheduler.finish_requests("one", RequestStatus.FINISHED_ABORTED)
    add("two", None)
    found = {new.req_id: new.num_computed_tokens for new in step().scheduled_new_reqs}
    assert found["two"] <= computed
