"""When blends run and tokens leave, in vLLM's own core loop under asynchronous scheduling."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.structured_output import StructuredOutputManager

from blendrag.engine.compat.connector import KVConnectorRole
from blendrag.engine.forward.slices import IDLE_S, Pace, Sliced
from blendrag.engine.wire.recipe import BlendOrder, Recipe
from blendrag.engine.wire.report import BlendReport
from blendrag.engine.worker.connector import BlendConnector
from blendrag.settings import Settings
from tests.helpers.connector_halves import BLOCKS, Runner, engine_config, plane, vllm_request

BLEND_S, PIECE_S, LOAD_S = 0.2, 0.005, 0.3


class Executor:
    """vLLM's, of one process: what is asked for is done at once."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._output = runner, Future[Any]()

    def execute_model(self, scheduled: Any, non_block: bool) -> Future[Any]:
        self._output = Future[Any]()
        self._output.set_result(self._runner.step(scheduled))
        return self._output

    def sample_tokens(self, grammar: Any, non_block: bool) -> Future[Any]:
        return self._output


class Core(EngineCore):
    """Its loop, and nothing that it starts with."""

    def __init__(self, scheduler: AsyncScheduler, runner: Runner) -> None:
        executor: Any = Executor(runner)
        self.scheduler, self.model_executor = scheduler, executor
        self.batch_queue, self.batch_queue_size = deque(), 2
        self.is_mm_encoder_only = self.is_pooling_model = self.check_for_draft_tokens = False

    def log_error_detail(self, *_: Any) -> Any:
        return nullcontext()

    capture_iteration_details = log_error_detail

    def _should_throttle_prefills(self) -> bool:
        return False

    def _process_aborts_queue(self) -> None: ...

    def _attach_iteration_details(self, *_: Any) -> None: ...

    _attach_weight_version = _attach_iteration_details


class Loop:
    """A core whose blends take ``BLEND_S``. log: what happened when, as (name, seconds since the start)."""

    def __init__(self, model_dir: Path) -> None:
        config = engine_config(model_dir, Settings.load())
        self.scheduler = AsyncScheduler(config, BLOCKS, StructuredOutputManager(config), block_size=128)
        self.runner = Runner(BlendConnector(config, KVConnectorRole.WORKER, BLOCKS))
        share = float(self.runner.connector.options["blend_share"])
        self.runner.connector.bind(plane(self._blend, share=share))
        self.core, self.log, self._begin = Core(self.scheduler, self.runner), dict[str, float](), 0.0

    def _blend(self, order: BlendOrder, pace: Pace) -> Sliced:
        self._happened(f"{order.request_id} begins")
        arrives = time.perf_counter() + (LOAD_S if "slow" in order.request_id else 0.0)

        def there(wait_s: float) -> bool:
            time.sleep(max(0.0, min(wait_s, arrives - time.perf_counter())))
            return time.perf_counter() >= arrives

        while not pace.arrived(there):
            yield
        for _ in range(round(BLEND_S / PIECE_S)):
            time.sleep(PIECE_S)
            if pace.pause(100):
                yield
        self.runner.there[order.request_id] = set(range(len(order.token_ids)))
        self._happened(f"{order.request_id} ends")
        return BlendReport(cached=200, ms=dict.fromkeys(("load", "select", "recompute"), 1.0))

    def _happened(self, what: str) -> None:
        self.log.setdefault(what, time.perf_counter() - self._begin)

    def add(self, name: str, blended: bool = True) -> None:
        params = Recipe("store", (("chunk", 4, 200),)).transfer_params("ticket") if blended else None
        self.scheduler.add_request(vllm_request(name, params))

    def run(self, later: dict[str, float] | None = None) -> None:
        """To the end. later: plain requests that come so many seconds after the start."""
        self._begin, waiting = time.perf_counter(), dict(later or {})
        while waiting or self.scheduler.has_requests() or self.core.batch_queue:
            for name in [name for name, at in waiting.items() if time.perf_counter() - self._begin > at]:
                del waiting[name]
                self._happened(f"{name} comes")
                self.add(name, blended=False)
            for outputs in (self.core.step_with_batch_queue()[0] or {}).values():
                for output in outputs.outputs:
                    self._happened(f"{output.request_id} answers")


@pytest.fixture
def loop(model_dir: Path) -> Loop:
    return Loop(model_dir)


def test_first_of_two_prompts_is_answered_before_the_second_is_blended(loop: Loop) -> None:
    loop.add("one")
    loop.add("two")
    loop.run()
    assert loop.log["one ends"] < loop.log["one answers"] < loop.log["two begins"], loop.log
    assert loop.log["two ends"] < loop.log["two answers"]


@pytest.mark.parametrize("name", ["long", "slow"])
def test_plain_prompt_waits_no_longer_than_a_slice_for_a_blend(loop: Loop, name: str) -> None:
    """Of one that computes, or waits for a tier."""
    loop.add(name)
    loop.run({"plain": 0.05})
    assert loop.log["plain answers"] - loop.log["plain comes"] < 3 * IDLE_S, loop.log
    assert loop.log["plain answers"] < loop.log[f"{name} ends"]
