"""The vLLM KV connector: the scheduler half claims a blended prompt's tokens, the worker half computes them.

A load is asynchronous: the request joins the engine's steps when its blend has ended, or has failed, and goes
on by a slice per step beside running requests (``engine.worker.slices``). On CPU, with nothing else to do, it
is synchronous: ``start_load_kv`` runs before the engine's own forward of the same step, which then computes
the prompt's last token and samples. vLLM imports this module in all of its processes.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blendrag.engine.compat.connector import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    RequestBlocks,
    evict_blocks,
    least_rows,
    takes_back_steps,
)
from blendrag.engine.compat.platform import front_end_in_rust
from blendrag.engine.prefixes import NodeLoad, NodeSave
from blendrag.engine.recipe import (
    FIELD,
    SECRET,
    BlendOrder,
    EvictionOrder,
    Recipe,
    is_sealed,
    read_recipe,
)
from blendrag.engine.report import BlendReport, Eviction
from blendrag.engine.worker.freeing import BlockFreeing
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
from blendrag.engine.worker.prefix_claims import PrefixClaims, held_tokens
from blendrag.engine.worker.reordering import Reordering
from blendrag.errors import ConfigError

if TYPE_CHECKING:
    from blendrag.engine.worker.data_plane import DataPlane

# Requests that are blended, or next in line, beside running ones. Those behind them hold no blocks yet.
_BLENDS_AHEAD = 2

# Between two looks at the tiers' statistics, in steps that blend nothing.
_TIERS_EVERY_S = 1.0


@dataclass
class BlendMetadata(KVConnectorMetadata):
    """Scheduler to worker, every step. busy: whether the step computes anything for running requests;
    follows: whether it comes right after the last one, as it does while an answer is being generated;
    ended: requests that have ended, or given up; loads, saves: nodes of exact prefixes; preempted: requests
    that have lost their blocks; evictions: prompts whose KV is evicted before the step's forward."""

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
    """Worker to scheduler: what was done, and what became of its KV, by request id."""

    reports: dict[str, BlendReport]
    evictions: dict[str, Eviction] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, BlendReports)
        return BlendReports({**other.reports, **self.reports}, {**other.evictions, **self.evictions})


class BlendConnector(KVConnectorBase_V1):
    """Registered by module path; one instance in the scheduler's process, one in every worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.options: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
        extra = self.options
        self._salt_needed = bool(vllm_config.cache_config.enable_prefix_caching)
        self._block_size = int(vllm_config.cache_config.block_size)
        self._share = float(extra.get("blend_share", 1.0))
        self._always_beside = extra.get("claim") == "async" or not takes_back_steps(vllm_config)
        self._secret = os.environ.get(SECRET)
        if self._secret and front_end_in_rust():
            raise ConfigError("vLLM's front end in Rust takes no plugins: nothing would be blended")
        if extra.get("sealed") and not self._secret and role is KVConnectorRole.SCHEDULER:
            raise ConfigError(f"the engine of a server has no {SECRET}: it would take anybody's recipes")
        # scheduler half
        self._pool: Any = None
        self._freeing = BlockFreeing(None)
        self._orders: list[BlendOrder] = []
        self._running: set[str] = set()  # requests that the last step computed something for
        self._beside: set[str] = set()  # requests whose blend is claimed asynchronously
        self._blending: set[str] = set()  # those of them that the worker was told of, and has not finished
        self._failed: set[str] = set()  # requests that the engine prefills itself
        self._ordered: set[str] = set()  # requests that the worker blends or has blended
        self._results: dict[str, BlendReport] = {}
        self._prefixes = PrefixClaims()
        window = int(extra.get("reorder_window", 0))
        self._reordering = Reordering(window) if window else None
        self._tally: Tally = {}
        # worker half
        self._data_plane: DataPlane | None = None
        self._failed_blocks: set[int] = set()
        self._arrived: set[str] = set()
        self._reports: dict[str, BlendReport] = {}
        self._evictions: dict[str, Eviction] = {}
        self._meter, self._looked = TierMeter(), 0.0

    # -- scheduler half -----------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._freeing = BlockFreeing(RequestBlocks.of(kv_cache_manager))

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool

    def on_new_request(self, request: Any) -> None:
        if self._reordering is not None and FIELD not in (request.kv_transfer_params or {}):
            held, prompt = held_tokens(request), request.num_prompt_tokens
            self._reordering.arrived(request.request_id, held, prompt)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        try:
            recipe = self._recipe_of(request)
            exact = 0 if recipe else self._prefixes.claim(request, num_computed_tokens)
        except Exception as error:  # a server's clients send what they like
            self._results[request.request_id] = BlendReport(
                cause="recipe", fallback=f"unreadable recipe: {error}"
            )
            return 0, False
        if request.request_id in self._failed:
            return 0, False
        if recipe is None:
            if self._reordering and not self._reordering.may_begin(request.request_id, num_computed_tokens):
                return None, False
            return exact, exact > 0 and self._always_beside
        if self._salt_needed and not request.cache_salt:
            self._results[request.request_id] = BlendReport(
                cause="salt", fallback="no cache salt while prefix caching is on"
            )
            return 0, False
        claimed = self._claim(recipe, request)
        new = claimed - num_computed_tokens
        if new <= 0 or 0 < recipe.reused_end(claimed, self._block_size) <= num_computed_tokens:
            return 0, False
        if len(self._blending) >= _BLENDS_AHEAD:
            return None, False  # it would hold its blocks, and do nothing with them
        if self._share >= 1 and self._orders:
            return None, False  # one a step, so that the first has its token before the second begins
        others = self._share < 1 and bool(self._running or self._blending or self._orders)
        waits = self._always_beside or others
        (self._beside.add if waits else self._beside.discard)(request.request_id)
        return new, waits

    def _claim(self, recipe: Recipe, request: Any) -> int:
        return recipe.claim(request.num_prompt_tokens, self._block_size, own=least_rows())

    def _recipe_of(self, request: Any) -> Recipe | None:
        """Raises what it likes for one that is broken, or not this server's."""
        params = request.kv_transfer_params
        if self._secret and params and not is_sealed(params, request.cache_salt, self._secret):
            raise ValueError("it is not this server's")
        return read_recipe(params)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._reordering is not None:
            self._reordering.began(request.request_id)
        try:
            recipe = self._recipe_of(request)
        except Exception:  # nothing was claimed for it, and nothing of it is kept
            return
        if recipe is None and request.request_id in self._failed:
            return  # its prefix could not be loaded: nothing more of it is kept
        if recipe is None:
            block_ids, waits = blocks.get_block_ids()[0], self._always_beside
            self._prefixes.allocated(request, block_ids, num_external_tokens, waits=waits)
            if num_external_tokens:
                self._ordered.add(request.request_id)
            return
        if not num_external_tokens:
            return
        claimed = self._claim(recipe, request)
        waits = request.request_id in self._beside
        self._ordered.add(request.request_id)
        self._freeing.expect(request, recipe)
        if waits:
            self._blending.add(request.request_id)
        self._orders.append(
            BlendOrder(
                request.request_id,
                str(request.kv_transfer_params.get("ticket", "")),
                list(request.all_token_ids[:claimed]),
                list(blocks.get_block_ids()[0]),
                claimed - num_external_tokens,
                recipe,
                waits,
            )
        )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        orders, self._orders = self._orders, []
        before, self._running = self._running, set(scheduler_output.num_scheduled_tokens)
        ended = frozenset(scheduler_output.finished_req_ids)
        follows = not before.isdisjoint(self._running)
        if self._reordering is not None:
            self._reordering.step_over()
        loads, saves = self._prefixes.take_loads(), self._prefixes.saves(scheduler_output)
        preempted = frozenset(scheduler_output.preempted_req_ids or ())
        evictions = self._freeing.orders(scheduler_output.num_scheduled_tokens)
        busy = bool(self._running)
        return BlendMetadata(orders, busy, follows, ended, loads, saves, preempted, evictions)

    def update_connector_output(self, connector_output: Any) -> None:
        # They were named by their content when they were claimed. vLLM leaves that, and computes it in
        # chunks, before whose end the request may go.
        if connector_output.invalid_block_ids and self._pool is not None:
            evict_blocks(self._pool, connector_output.invalid_block_ids)
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, BlendReports):
            for request_id, report in meta.reports.items():
                if not self._prefixes.grows(request_id):
                    merge(self._tally, of_report(report))
                self._blending.discard(request_id)
                if request_id in self._ordered:  # else it has ended in this very step
                    self._results[request_id] = report
                    if report.fallback:
                        self._failed.add(request_id)
                        self._prefixes.forget(request_id)
                        self._freeing.forget(request_id)
            for request_id, eviction in meta.evictions.items():
                merge(self._tally, of_eviction(eviction))
                self._freeing.free(request_id, eviction)
                if request_id in self._results:
                    self._results[request_id] = self._results[request_id].evicted(eviction)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        grows = self._prefixes.grows(request.request_id)
        self._prefixes.forget(request.request_id)
        if self._reordering is not None:
            self._reordering.ended(request.request_id)
        result = self._results.pop(request.request_id, None)
        self._freeing.forget(request.request_id)
        for requests in (self._running, self._beside, self._blending, self._failed):
            requests.discard(request.request_id)
        if request.request_id in self._ordered:
            self._ordered.remove(request.request_id)
        elif result is not None:
            merge(self._tally, of_report(result))
        elif request.num_computed_tokens and not grows:  # else it was cancelled before it began
            recipe = read_recipe(request.kv_transfer_params)
            merge(self._tally, of_outcome("prefix" if recipe else "plain"))
        return False, None if result is None else {FIELD: result.to_plain()}

    # -- worker half --------------------------------------------------------------------------------------

    def bind(self, data_plane: DataPlane) -> None:
        """Give the worker half its model. Called once, before the first request."""
        self._data_plane = data_plane

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._data_plane is None or not isinstance(connector_metadata, BlendMetadata):
            return
        # Before the step's forward, which may have their blocks as others', and reads what is left.
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
        self._arrived.update(order.request_id for order in queue.cancel(metadata.ended) if order.waits)
        if queue:
            self._data_plane.wait_for_device()  # else the engine's own forward would be taken for ours
        clock = self._data_plane.clock
        clock.enter(follows=metadata.follows)
        sliced = metadata.busy and self._share < 1
        for order, outcome in queue.run(clock.slice_s(self._share) if sliced else None):
            self._finish(order, outcome)
        clock.leave()

    def wait_for_save(self) -> None:
        """Nodes of exact prefixes are copied out of the blocks of the step that has completed them."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, BlendMetadata)
        if self._data_plane is not None:
            self._data_plane.prefixes.save(metadata.saves, self._failed_blocks)
            self._data_plane.prefixes.ended(metadata.ended)

    def _finish(self, order: BlendOrder | NodeLoad, outcome: BlendReport | Exception) -> None:
        if isinstance(outcome, Exception):  # whatever it is, the engine's own prefill gives the right answer
            first = order.written // self._block_size
            self._failed_blocks.update(order.block_ids[first:])
            outcome = BlendReport.failed(outcome, order.written)
        self._reports[order.request_id] = outcome
        if order.waits:
            self._arrived.add(order.request_id)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Nothing is sent. Received: requests whose blend has ended, and those that gave up waiting for it,
        whose blocks the scheduler keeps until it hears of them."""
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
        """What was prefilled is written before the process ends."""
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
        """Nothing to wait for: a request whose KV is not complete has no part in the forward."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Chunk KV is never cut from live requests (decision D3); nodes are, of all layers at once."""
