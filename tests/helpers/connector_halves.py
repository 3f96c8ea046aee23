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

from blendrag.control.guard import LoadGuard
from blendrag.engine.blend.blends import Blends
from blendrag.engine.client.launch import connector_args
from blendrag.engine.compat.states import CAN_FAIL
from blendrag.engine.forward.prompt_forward import LoadedModel
from blendrag.engine.forward.ranks import ALONE
from blendrag.engine.forward.slices import Pace, Sliced, StepClock
from blendrag.engine.guard.prefill_times import GuardTimes
from blendrag.engine.hooks import Reports
from blendrag.engine.prefixes.exact_prefixes import ExactPrefixes
from blendrag.engine.wire.recipe import BlendOrder
from blendrag.engine.worker.connector import BlendConnector
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


def engine_config(model_dir: Path, settings: Settings, asynchronous: bool = True, **more: Any) -> Any:
    """The configuration of an engine whose scheduler has the connector. more: arguments of vLLM's."""
    arguments: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "enable_prefix_caching": False}
    transfer = KVTransferConfig(**connector_args(settings))
    made = EngineArgs(str(model_dir), kv_transfer_config=transfer, **arguments | more).create_engine_config()
    made.scheduler_config.async_scheduling = asynchronous
    made.cache_config.num_gpu_blocks = 64
    return made


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
