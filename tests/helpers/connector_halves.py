"""Both halves of the connector around a model of a few lines, for vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from blendrag.control.guard import LoadGuard
from blendrag.engine.blend.blends import Blends
from blendrag.engine.client.launch import connector_args
from blendrag.engine.compat.connector import KVConnectorRole
from blendrag.engine.compat.requests import SamplingParams
from blendrag.engine.compat.states import CAN_FAIL
from blendrag.engine.forward.prompt_forward import LoadedModel
from blendrag.engine.forward.ranks import ALONE
from blendrag.engine.forward.slices import Pace, Sliced, StepClock
from blendrag.engine.guard.prefill_times import GuardTimes
from blendrag.engine.hooks import Asked, Reports
from blendrag.engine.prefixes.exact_prefixes import ExactPrefixes
from blendrag.engine.wire.recipe import BlendOrder, Recipe
from blendrag.engine.wire.report import BlendReport
from blendrag.engine.worker.connector import BlendConnector, BlendReports
from blendrag.settings import Settings

needs_groups = pytest.mark.skipif(
    not CAN_FAIL,
    reason="vLLM 0.27 cannot be told which request failed, so we have it keep one group of blocks",
)

PROMPT = 300  # tokens: three blocks
WRONG = -7
_NOTHING: Any = None
_CPU: Any = SimpleNamespace(device=torch.device("cpu"))
_LAYER = FullAttentionSpec(block_size=128, num_kv_heads=1, head_size=8, dtype=torch.float32)
BLOCKS = KVCacheConfig(64, [], [KVCacheGroupSpec(["layer"], _LAYER)])
WINDOW = 100  # tokens
_WINDOWED = SlidingWindowSpec(
    block_size=128, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=WINDOW
)
GROUPS = KVCacheConfig(64, [], [KVCacheGroupSpec(["one"], _WINDOWED), KVCacheGroupSpec(["other"], _LAYER)])
"""Of a model that has layers with and without windows."""
WINDOWED = KVCacheConfig(64, [], [KVCacheGroupSpec(["layer"], _WINDOWED)])


def engine_config(
    model_dir: Path, settings: Settings, asynchronous: bool = True, sealed: bool = False, **more: Any
) -> Any:
    """The configuration of an engine whose scheduler has the connector. more: arguments of vLLM's."""
    arguments: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "enable_prefix_caching": False}
    transfer = KVTransferConfig(**connector_args(settings, sealed=sealed))
    made = EngineArgs(str(model_dir), kv_transfer_config=transfer, **arguments | more).create_engine_config()
    made.scheduler_config.async_scheduling = asynchronous
    made.cache_config.num_gpu_blocks = 64
    return made


def request_of(params: Any, tokens: int = PROMPT, salt: str | None = "salt", name: str = "r") -> Any:
    """What connectors read of vLLM's request, whose prompt has so many tokens."""
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=params,
        cache_salt=salt,
        num_prompt_tokens=tokens,
        num_tokens=tokens,
        num_computed_tokens=0,
        num_preemptions=0,
        prompt_token_ids=list(range(tokens)),
        all_token_ids=list(range(tokens)),
        mm_features=[],
    )


def asked(params: Any, tokens: int, recipe: Recipe | None = None, **more: Any) -> Asked:
    """The same request as the scheduler's halves of mechanisms know it."""
    return Asked(request_of(params, tokens, **{"salt": None} | more), recipe)


def vllm_request(
    name: str,
    params: Any = None,
    tokens: int = PROMPT,
    max_tokens: int = 4,
    cache_salt: str | None = None,
    block_hasher: Any = None,
    **sampling: Any,
) -> Request:
    """A request whose client has sent these parameters for connectors."""
    extra = None if params is None else {"kv_transfer_params": params}
    asked = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra, **sampling)
    asked.update_from_generation_config({}, 1)
    ids = list(range(tokens))
    return Request(name, ids, asked, None, cache_salt=cache_salt, block_hasher=block_hasher)


class SchedulerHalf(BlendConnector):
    """The connector's half in the scheduler's process, and how vLLM's scheduler asks it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, KVConnectorRole.SCHEDULER, BLOCKS)

    def claims(self, request: Any) -> int | None:
        return self.get_num_new_matched_tokens(request, 0)[0]

    def begins(self, request: Any) -> int:
        """Has a request begin in three blocks, with the tokens that are claimed for it."""
        claimed = self.claims(request) or 0
        blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],))
        self.update_state_after_alloc(request, blocks, claimed)
        return claimed

    def hears(self, request_id: str, report: BlendReport) -> None:
        """Of what a worker has done."""
        reports = BlendReports({request_id: report})
        self.update_connector_output(SimpleNamespace(kv_connector_worker_meta=reports))

    def step(self, **tokens: int) -> Any:
        """What the workers are told in a step that computes so many tokens."""
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
        output = SimpleNamespace(
            num_scheduled_tokens=tokens,
            finished_req_ids=set(),
            scheduled_cached_reqs=cached,
            preempted_req_ids=None,
        )
        return self.build_connector_meta(output)


@dataclass
class Runner:
    """The connector's worker half around a model whose next token is its position, if all before it is there.

    As vLLM's second model runner it counts a request's tokens by itself from where it was added.
    """

    connector: BlendConnector
    there: dict[str, set[int]] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)

    def step(self, scheduled: Any) -> ModelRunnerOutput:
        for new in scheduled.scheduled_new_reqs:
            self.counted[new.req_id] = new.num_computed_tokens
        half = self.connector
        half.bind_connector_metadata(scheduled.kv_connector_metadata)
        first = getattr(scheduled, "has_sync_kv_loads", True)  # before vLLM 0.30 always
        if first:
            half.start_load_kv(None)
        tokens = [self.forward(name, count) for name, count in scheduled.num_scheduled_tokens.items()]
        if not first:
            half.start_load_kv(None)
        if CAN_FAIL:
            results = vars(half.get_transfer_results(scheduled.finished_req_ids))
        else:
            results = {"finished_recving": half.get_finished(scheduled.finished_req_ids)[1]}
        output = KVConnectorOutput(
            **results,
            invalid_block_ids=half.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=half.build_connector_worker_meta(),
        )
        half.clear_connector_metadata()
        names = list(scheduled.num_scheduled_tokens)
        numbers = {name: number for number, name in enumerate(names)}
        return ModelRunnerOutput(names, numbers, tokens, kv_connector_output=output)

    def forward(self, name: str, count: int) -> list[int]:
        begin = self.counted[name]
        end = self.counted[name] = begin + count
        self.there.setdefault(name, set()).update(range(begin, end))
        if end < PROMPT:
            return []
        return [end if self.there[name] == set(range(end)) else WRONG]


def plane(
    start: Callable[[BlendOrder, Pace], Sliced],
    load: Callable[[Any], Any] = lambda order: None,
    share: float = 1.0,
    guard: LoadGuard | None = None,
) -> Any:
    """What a worker's half is bound to. start: blends. load: loads nodes of exact prefixes."""

    class Blended(Blends):
        def blend(self, order: BlendOrder, pace: Pace) -> Sliced:
            return start(order, pace)

    class Loaded(ExactPrefixes):
        def load(self, order: Any) -> Any:
            return load(order)

    guard, model = guard or LoadGuard(), LoadedModel(_NOTHING, _CPU, ALONE)
    hooks = [
        GuardTimes(guard),
        Loaded(_CPU, "", _NOTHING, guard),
        Blended(model, _NOTHING, StepClock(), share, [], guard),
    ]
    return SimpleNamespace(hooks=hooks, tiers=[], reports=Reports())
