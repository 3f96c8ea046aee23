"""The vLLM KV connector: the scheduler half claims a blended prompt's tokens, the worker half computes them.

Every claim is asynchronous: the blend goes on by a slice per engine step (``engine.forward.slices``), and its
request joins the steps when it has ended, or has failed. vLLM imports this module in all of its processes.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from blendrag.engine.budget.freeing import BlockFreeing
from blendrag.engine.compat.connector import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    RequestBlocks,
    least_rows,
)
from blendrag.engine.compat.platform import front_end_in_rust
from blendrag.engine.forward.slices import IDLE_S
from blendrag.engine.prefixes.prefix_claims import PrefixClaims, held_tokens
from blendrag.engine.prefixes.reordering import Reordering
from blendrag.engine.wire.prefixes import NodeLoad, NodeSave, read_path
from blendrag.engine.wire.recipe import (
    FIELD,
    SECRET,
    BlendOrder,
    EvictionOrder,
    Recipe,
    is_sealed,
    read_recipe,
)
from blendrag.engine.wire.report import BlendReport, Cause, Eviction
from blendrag.engine.worker.failures import Failures, MemoryLimit
from blendrag.engine.worker.metrics import (
    BlendMetrics,
    BlendStats,
    Tally,
    TierMeter,
    merge,
    of_eviction,
    of_outcome,
    of_report,
)
from blendrag.errors import ConfigError

if TYPE_CHECKING:
    from blendrag.engine.worker.data_plane import DataPlane

# Requests that are blended, or next in line, at the same time as others run. Those behind them hold no blocks
# yet.
_BLENDS_AHEAD = 2

# The time between two looks at the tiers' statistics, in steps that blend nothing.
_TIERS_EVERY_S = 1.0

_log = logging.getLogger(__name__)


@dataclass
class BlendMetadata(KVConnectorMetadata):
    """The scheduler's message to the worker in every step.

    busy: whether the step computes anything for running requests. follows: whether it comes right after the
    last one, as it does while an answer is being generated. ended: requests that have ended, or given up.
    loads, saves: nodes of exact prefixes. preempted: requests that have lost their blocks. evictions: prompts
    whose KV is evicted before the step's forward.
    """

    orders: list[BlendOrder] = field(default_factory=list)
    busy: bool = False
    follows: bool = False
    ended: frozenset[str] = frozenset()
    loads: list[NodeLoad] = field(default_factory=list)
    saves: list[NodeSave] = field(default_factory=list)
    preempted: frozenset[str] = frozenset()
    evictions: list[EvictionOrder] = field(default_factory=list)


@dataclass
class BlendReports(KVConnectorWorkerMetadata):
    """The worker's message to the scheduler, by request id: what was done, and what became of its KV."""

    reports: dict[str, BlendReport]
    evictions: dict[str, Eviction] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, BlendReports)
        return BlendReports({**other.reports, **self.reports}, {**other.evictions, **self.evictions})


@dataclass(slots=True)
class _Asked:
    """A request between its arrival and its end, in the scheduler's process.

    recipe: how it is blended; None: it is not. state: ``new``; ``ordered``: the worker was told to compute
    what was claimed for it; ``here``: the worker has done that; ``failed``: the engine prefills it itself.
    result: the report that its answer carries, once that is known. tokens: how many of its prompt were
    claimed.
    """

    recipe: Recipe | None = None
    state: Literal["new", "ordered", "here", "failed"] = "new"
    result: BlendReport | None = None
    tokens: int = 0
    refused: bool = False  # the worker has never heard of it

    def refuse(self, cause: Cause, why: str) -> None:
        """Have the engine prefill the request, and its answer say why."""
        self.recipe, self.state, self.refused = None, "failed", True
        self.result = BlendReport(cause=cause, fallback=why)


class BlendConnector(KVConnectorBase_V1):
    """The connector that vLLM loads by module path: one instance in the scheduler's process, one in every
    worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.options: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
        extra = self.options
        self._salt_needed = bool(vllm_config.cache_config.enable_prefix_caching)
        self._block_size = int(vllm_config.cache_config.block_size)
        self._share = float(extra.get("blend_share", 1.0))
        self._secret = os.environ.get(SECRET)
        if self._secret and front_end_in_rust():
            raise ConfigError("vLLM's front end in Rust takes no plugins: nothing would be blended")
        if extra.get("sealed") and not self._secret and role is KVConnectorRole.SCHEDULER:
            raise ConfigError(f"the engine of a server has no {SECRET}: it would take anybody's recipes")
        # scheduler half
        self._freeing = BlockFreeing(None)
        self._orders: list[BlendOrder] = []
        self._running: set[str] = set()  # requests that the last step computed something for
        self._asked: dict[str, _Asked] = {}
        self._blending: set[str] = set()  # requests that the worker was told of, and has not finished
        self._memory = MemoryLimit()
        self._prefixes = PrefixClaims()
        window = int(extra.get("reorder_window", 0))
        self._reordering = Reordering(window) if window else None
        self._tally: Tally = {}
        # worker half
        self._data_plane: DataPlane | None = None
        self._failed_blocks: set[int] = set()
        self._failures = Failures(_log)
        self._arrived: set[str] = set()
        self._reports: dict[str, BlendReport] = {}
        self._evictions: dict[str, Eviction] = {}
        self._meter, self._looked = TierMeter(), 0.0

    # -- scheduler half -----------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._freeing = BlockFreeing(RequestBlocks.of(kv_cache_manager))

    def on_new_request(self, request: Any) -> None:
        asked = self._of(request)
        if self._reordering is not None and asked.recipe is None:
            held, prompt = held_tokens(request), request.num_prompt_tokens
            self._reordering.arrived(request.request_id, held, prompt)

    def _of(self, request: Any) -> _Asked:
        """Return what is known of a request. Its recipe is read once: a waiting request is asked about in
        every step."""
        known = self._asked.get(request.request_id)
        if known is not None:
            return known
        asked = self._asked[request.request_id] = _Asked()
        params, salt = request.kv_transfer_params, request.cache_salt
        try:
            if self._secret and params and not is_sealed(params, salt, self._secret):
                raise ValueError("it is not this server's")
            asked.recipe = read_recipe(params)
            read_path(params, request.num_prompt_tokens)
        except Exception as error:  # a server's clients send what they like
            asked.refuse("recipe", f"unreadable recipe: {error}")
        if asked.recipe and self._salt_needed and not salt:
            asked.refuse("salt", "no cache salt while prefix caching is on")
        return asked

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        asked = self._of(request)
        if asked.state == "failed":
            return 0, False
        if asked.recipe is None:
            if self._reordering and not self._reordering.may_begin(request.request_id, num_computed_tokens):
                return None, False
            exact = self._prefixes.claim(request, num_computed_tokens)
            return exact, exact > 0
        claimed = self._claim(asked.recipe, request)
        new = claimed - num_computed_tokens
        if new <= 0 or 0 < asked.recipe.reused_end(claimed, self._block_size) <= num_computed_tokens:
            return 0, False
        if not self._memory.suffices(claimed):
            asked.refuse("memory", "a prompt that is no longer than this one has just run out of memory")
            return 0, False
        if len(self._blending) >= _BLENDS_AHEAD:
            return None, False  # it would hold its blocks, and do nothing with them
        return new, True

    def _claim(self, recipe: Recipe, request: Any) -> int:
        return recipe.claim(request.num_prompt_tokens, self._block_size, own=least_rows())

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        request_id, asked = request.request_id, self._of(request)
        if self._reordering is not None:
            self._reordering.began(request_id)
        if asked.state == "failed":  # nothing more of it is kept
            return
        block_ids = list(blocks.get_block_ids()[0])
        if asked.recipe is None:
            self._prefixes.allocated(request, block_ids, num_external_tokens)
        elif num_external_tokens:
            claimed = self._claim(asked.recipe, request)
            asked.tokens = claimed
            self._freeing.expect(request, asked.recipe)
            self._blending.add(request_id)
            ticket, ids = str(request.kv_transfer_params.get("ticket", "")), list(request.prompt_token_ids)
            written, room = claimed - num_external_tokens, len(block_ids) * self._block_size
            behind = ids[claimed:] if len(ids) <= room else []
            self._orders.append(
                BlendOrder(request_id, ticket, ids[:claimed], block_ids, written, asked.recipe, behind)
            )
        if num_external_tokens:
            asked.state = "ordered"

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        orders, self._orders = self._orders, []
        before, self._running = self._running, set(scheduler_output.num_scheduled_tokens)
        if self._reordering is not None:
            self._reordering.step_over()
        return BlendMetadata(
            orders,
            busy=bool(self._running),
            follows=not before.isdisjoint(self._running),
            ended=frozenset(scheduler_output.finished_req_ids),
            loads=self._prefixes.take_loads(),
            saves=self._prefixes.saves(scheduler_output),
            preempted=frozenset(scheduler_output.preempted_req_ids or ()),
            evictions=self._freeing.orders(scheduler_output.num_scheduled_tokens),
        )

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if not isinstance(meta, BlendReports):
            return
        for request_id, report in meta.reports.items():
            if not self._prefixes.grows(request_id):
                merge(self._tally, of_report(report))
            self._blending.discard(request_id)
            asked = self._asked.get(request_id)
            if asked is not None and asked.state == "ordered":  # else it has ended in this very step
                asked.result, asked.state = report, "failed" if report.fallback else "here"
                if report.cause == "memory":
                    self._memory.ran_out(asked.tokens)
                if report.fallback:
                    self._prefixes.forget(request_id)
                    self._freeing.forget(request_id)
        for request_id, eviction in meta.evictions.items():
            merge(self._tally, of_eviction(eviction))
            self._freeing.free(request_id, eviction)
            asked = self._asked.get(request_id)
            if asked is not None and asked.result is not None:
                asked.result = asked.result.evicted(eviction)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        asked, grows = self._asked.pop(request_id, _Asked()), self._prefixes.grows(request_id)
        self._prefixes.forget(request_id)
        self._freeing.forget(request_id)
        if self._reordering is not None:
            self._reordering.ended(request_id)
        self._running.discard(request_id)
        self._blending.discard(request_id)
        if asked.result is None and asked.state == "new" and request.num_computed_tokens and not grows:
            merge(self._tally, of_outcome("prefix" if asked.recipe else "plain"))
        elif asked.result is not None and asked.refused:
            merge(self._tally, of_report(asked.result))
        return False, None if asked.result is None else {FIELD: asked.result.to_plain()}

    # -- worker half --------------------------------------------------------------------------------------

    def bind(self, data_plane: DataPlane) -> None:
        """Give the worker half its model. Called once, before the first request."""
        self._data_plane = data_plane

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._data_plane is None or not isinstance(connector_metadata, BlendMetadata):
            return
        # Evict before the step's forward, which may give the blocks to others, and reads what is left.
        self._data_plane.compression.forget(connector_metadata.ended | connector_metadata.preempted)
        for order in connector_metadata.evictions:
            self._evictions[order.request_id] = self._data_plane.evict(order)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, BlendMetadata)
        if metadata.orders:
            self._looked = 0.0
        if self._data_plane is None:
            refused: list[BlendOrder | NodeLoad] = [*metadata.orders, *metadata.loads]
            for order in refused:
                self._finish(order, RuntimeError("the worker is not bound to its model yet"))
            return
        for load in metadata.loads:
            try:
                report = self._data_plane.load(load)
            except Exception as error:
                self._finish(load, error)
            else:
                if report is not None:
                    self._finish(load, report)
        queue = self._data_plane.queue
        queue.add(metadata.orders)
        self._arrived.update(order.request_id for order in queue.cancel(metadata.ended))
        if queue:
            self._data_plane.wait_for_device()  # otherwise the engine's own forward would be taken for ours
        clock = self._data_plane.clock
        clock.enter(follows=metadata.follows)
        idle = not metadata.busy
        done = queue.run(IDLE_S if idle else clock.slice_s(self._share), idle=idle)
        if done is not None:
            self._finish(*done)
        clock.leave()

    def wait_for_save(self) -> None:
        """Copy nodes of exact prefixes out of the blocks of the step that has completed them."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, BlendMetadata)
        if self._data_plane is not None:
            self._data_plane.prefixes.save(metadata.saves, self._failed_blocks)
            self._data_plane.prefixes.ended(metadata.ended)

    def _finish(self, order: BlendOrder | NodeLoad, outcome: BlendReport | Exception) -> None:
        if isinstance(outcome, Exception):  # in any case, the engine's own prefill gives the right answer
            self._failures.log(outcome)
            first = order.written // self._block_size
            self._failed_blocks.update(order.block_ids[first:])
            outcome = BlendReport.failed(outcome, order.written)
        self._reports[order.request_id] = outcome
        if order.token_ids:  # otherwise nobody waits for it
            self._arrived.add(order.request_id)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return None for what was sent, and the requests that were received: those whose blend has ended,
        and those that gave up waiting for it, whose blocks the scheduler keeps until it hears of them."""
        arrived, self._arrived = self._arrived, set()
        return None, arrived or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        reports, self._reports = self._reports, {}
        evictions, self._evictions = self._evictions, {}
        return BlendReports(reports, evictions) if reports or evictions else None

    def shutdown(self) -> None:
        """Write what was prefilled before the process ends."""
        if self._data_plane is not None:
            self._data_plane.close()

    # -- metrics, of both halves --------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> BlendStats | None:
        now = time.monotonic()
        if self._data_plane is not None and self._looked + _TIERS_EVERY_S < now:
            self._looked = now
            merge(self._tally, self._meter.growth(self._data_plane.tiers))
        tally, self._tally = self._tally, {}
        return BlendStats(tally) if tally else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> BlendStats:
        return BlendStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> BlendMetrics:
        return BlendMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- not needed ---------------------------------------------------------------------------------------

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request whose KV is not complete has no part in the forward."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: chunk KV is never cut from live requests (decision D3); nodes are, of all layers at
        once."""
