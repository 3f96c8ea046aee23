"""The vLLM KV connector: the scheduler half claims a blended prompt's tokens, the worker half computes them.

What is claimed and computed is the mechanisms' business (``engine/hooks.py``). Every claim is asynchronous:
its request joins the steps when what was claimed is there, or has failed. vLLM imports this module in all of
its processes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blendrag.engine.blend.claims import BlendClaims
from blendrag.engine.budget.freeing import BlockFreeing
from blendrag.engine.compat.connector import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    RequestBlocks,
    SchedulerStep,
    SupportsHMA,
    Transfer,
    block_ids_of,
    message_of_workers,
    transfer_results,
)
from blendrag.engine.compat.groups import LayerGroup, groups_of_config
from blendrag.engine.compat.platform import front_end_in_rust
from blendrag.engine.compat.states import CAN_FAIL, StateBlocks, StateGroups
from blendrag.engine.guard.prefill_times import PrefillTimes
from blendrag.engine.hooks import Asked, SchedulerHook, Step
from blendrag.engine.prefixes.prefix_claims import PrefixClaims
from blendrag.engine.prefixes.reordering import ReorderedClaims
from blendrag.engine.wire.recipe import FIELD, SECRET, is_sealed
from blendrag.engine.wire.report import BlendReport, Tally
from blendrag.engine.worker.failures import Failures
from blendrag.engine.worker.metrics import BlendMetrics, BlendStats, TierMeter, merge, of_outcome, of_report
from blendrag.errors import ConfigError

if TYPE_CHECKING:
    from blendrag.engine.worker.data_plane import Plane

# The time between two looks at the tiers' statistics, in steps that bring nothing.
_TIERS_EVERY_S = 1.0

_log = logging.getLogger(__name__)


def _hooks(
    transfer: Transfer, groups: Sequence[LayerGroup], states: StateBlocks | None
) -> list[SchedulerHook]:
    """Return the scheduler's halves of all mechanisms; of a hybrid model, those of exact prefixes. The first
    that claims a request's tokens has them."""
    window = int(transfer.options.get("reorder_window", 0))
    exact = [*([ReorderedClaims(window)] if window else []), PrefixClaims(states=states)]
    if states:
        return [PrefillTimes(), *exact]
    blends = BlendClaims(groups, salted=transfer.prefix_caching)
    return [PrefillTimes(), blends, *exact, BlockFreeing()]


@dataclass
class BlendReports(KVConnectorWorkerMetadata):
    """The worker's message to the scheduler: what was done, by request id, and what else the mechanisms'
    halves say, by mechanism and request id."""

    reports: dict[str, BlendReport]
    messages: dict[str, dict[str, Any]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, BlendReports)
        names = other.messages.keys() | self.messages.keys()
        messages = {name: other.messages.get(name, {}) | self.messages.get(name, {}) for name in names}
        return BlendReports(other.reports | self.reports, messages)


class BlendConnector(KVConnectorBase_V1):
    """The connector that vLLM loads by module path: one instance in the scheduler's process, one in every
    worker."""

    _states: StateBlocks | None = None

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = Transfer.of(vllm_config)
        self.options, self._block_size = transfer.options, transfer.block_size
        groups = groups_of_config(kv_cache_config) or [LayerGroup(transfer.block_size)]
        self._secret = os.environ.get(SECRET)
        if self._secret and front_end_in_rust():
            raise ConfigError("vLLM's front end in Rust takes no plugins: nothing would be blended")
        if self.options.get("sealed") and not self._secret and role is KVConnectorRole.SCHEDULER:
            raise ConfigError(f"the engine of a server has no {SECRET}: it would take anybody's recipes")
        # scheduler half
        self._hooks = _hooks(transfer, groups, self._states)
        self._running: set[str] = set()  # requests that the last step computed something for
        self._asked: dict[str, Asked] = {}
        self._refused: dict[str, BlendReport] = {}  # by ticket, until the workers are told
        self._tally: Tally = {}
        # worker half
        self._data_plane: Plane | None = None
        self._failed_blocks: set[int] = set()
        # Blocks of several groups have no common numbers, and those behind a window are nobody's.
        self._by_request = CAN_FAIL and (len(groups) > 1 or groups[0].window > 0)
        self._failed: set[str] = set()
        self._failures = Failures(_log)
        self._arrived: set[str] = set()
        self._reports: dict[str, BlendReport] = {}
        self._messages: dict[str, dict[str, Any]] = {}
        self._meter, self._looked = TierMeter(), 0.0

    # -- scheduler half -----------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        blocks = RequestBlocks.of(kv_cache_manager)
        for hook in self._hooks:
            hook.bind(blocks)

    def on_new_request(self, request: Any) -> None:
        self._of(request)

    def _of(self, request: Any) -> Asked:
        """Return what is known of a request. Its recipe is read once: a waiting request is asked about in
        every step."""
        asked = Asked(request)
        if (known := self._asked.get(asked.id)) is not None:
            return known
        self._asked[asked.id] = asked
        try:
            if self._secret and asked.params and not is_sealed(asked.params, asked.salt, self._secret):
                raise ValueError("it is not this server's")
            for hook in self._hooks:
                hook.arrived(asked)
        except Exception as error:  # a server's clients send what they like
            asked.refuse("recipe", f"unreadable recipe: {error}")
            if not isinstance(asked.params, dict):
                asked.drop_params()  # vLLM's scheduler looks into them next, and would end the engine
        return asked

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        asked = self._of(request)
        if not asked.preempted:  # else these are blocks that it has filled itself
            asked.prefix = num_computed_tokens
        for hook in self._hooks:
            claimed = 0 if asked.state == "failed" else hook.claim(asked, num_computed_tokens)
            if claimed is None or claimed > 0:
                return claimed, claimed is not None
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        asked, block_ids = self._of(request), block_ids_of(blocks)
        for hook in self._hooks:
            hook.allocated(asked, block_ids, num_external_tokens)
        if num_external_tokens and asked.state != "failed":
            asked.state = "ordered"
        if asked.refused and asked.result is not None and asked.result.cause != "recipe":
            self._refused[asked.ticket] = asked.result

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        step = SchedulerStep(scheduler_output)
        before, self._running = self._running, set(step.tokens)
        refused, self._refused = self._refused, {}
        return Step(
            {hook.name: hook.orders(step) for hook in self._hooks},
            busy=bool(self._running),
            follows=not before.isdisjoint(self._running),
            ended=step.ended,
            preempted=step.preempted,
            refused=refused,
        )

    def update_connector_output(self, connector_output: Any) -> None:
        meta = message_of_workers(connector_output)
        if not isinstance(meta, BlendReports):
            return
        for request_id, report in meta.reports.items():
            asked = self._asked.get(request_id)
            if asked is None or asked.counts:
                merge(self._tally, of_report(report))
            if asked is not None and asked.state == "ordered":  # else it has ended in this very step
                asked.result, asked.state = report, "failed" if report.fallback else "here"
                for hook in self._hooks:
                    hook.reported(asked, report)
        for hook in self._hooks:
            for request_id, message in meta.messages.get(hook.name, {}).items():
                merge(self._tally, hook.received(request_id, message, self._asked.get(request_id)))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        asked = Asked(request)
        asked = self._asked.pop(asked.id, asked)
        for hook in self._hooks:
            hook.finished(asked.id)
        self._running.discard(asked.id)
        if asked.counts and asked.state != "ordered" and (plain := asked.computed_plainly):
            merge(self._tally, {"blendrag_tokens": {"plain": plain}})
        if asked.result is None and asked.state == "new" and asked.computed and asked.counts:
            merge(self._tally, of_outcome("prefix" if asked.recipe else "plain"))
        elif asked.result is not None and asked.refused:
            merge(self._tally, of_report(asked.result))
        return False, None if asked.result is None else {FIELD: asked.result.to_plain()}

    # -- worker half --------------------------------------------------------------------------------------

    def bind(self, data_plane: Plane) -> None:
        """Give the worker half its model. Called once, before the first request."""
        self._data_plane = data_plane

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._data_plane is None or not isinstance(connector_metadata, Step):
            return
        for ticket, report in connector_metadata.refused.items():
            self._data_plane.reports.keep(ticket, report)
        for hook in self._data_plane.hooks:
            if messages := hook.before_forward(connector_metadata):
                self._messages.setdefault(hook.name, {}).update(messages)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._step()
        claims = [order for orders in step.orders.values() for order in orders.claims]
        if claims:
            self._looked = 0.0
        if self._data_plane is None:
            for order in claims:
                self._finish(order, RuntimeError("the worker is not bound to its model yet"))
            return
        for hook in self._data_plane.hooks:
            for order, outcome in hook.bring(step):
                self._finish(order, outcome)

    def wait_for_save(self) -> None:
        if self._data_plane is not None:
            for hook in self._data_plane.hooks:
                hook.after_forward(self._step(), self._failed_blocks)

    def _step(self) -> Step:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        return step

    def _finish(self, order: Any, outcome: BlendReport | Exception | None) -> None:
        if isinstance(outcome, Exception):  # in any case, the engine's own prefill gives the right answer
            self._failures.log(outcome)
            outcome = BlendReport.failed(outcome, order.written)
        if not order.token_ids:  # nobody waits for it: its request is in a step, perhaps in this one
            return
        if outcome is not None:
            if outcome.fallback:
                self._fail(order, outcome.prefix + outcome.exact)
            self._reports[order.request_id] = outcome
            if self._data_plane is not None:
                self._data_plane.reports.keep(order.ticket, outcome)
        self._arrived.add(order.request_id)

    def _fail(self, order: Any, there: int) -> None:
        """Note what has to be computed in place of what the order should have brought: all but the first
        tokens that are ``there``, or all of it, where blocks of several groups have no common numbers."""
        if self._by_request:
            self._failed.add(order.request_id)
        else:
            self._failed_blocks.update(order.block_ids[there // self._block_size :])

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return None for what was sent, and the requests that were received: those whose blend has ended,
        and those that gave up waiting for it, whose blocks the scheduler keeps until it hears of them."""
        arrived, self._arrived = self._arrived, set()
        return None, arrived or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return what :meth:`get_finished` does, and which of those requests have failed."""
        _, arrived = self.get_finished(finished_req_ids)
        failed, self._failed = self._failed, set()
        return transfer_results(arrived or set(), failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        reports, self._reports = self._reports, {}
        messages, self._messages = self._messages, {}
        return BlendReports(reports, messages) if reports or messages else None

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


class GroupsConnector(BlendConnector, SupportsHMA):
    """The connector of models whose layers vLLM may keep in several groups, with and without windows."""

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])


class StatesConnector(GroupsConnector):
    """The connector of hybrid models, some of whose groups have states: they are not blended, and their exact
    prefixes are kept with the states behind them."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        groups = StateGroups.of(kv_cache_config)
        self._states = StateBlocks(groups) if groups else None
        super().__init__(vllm_config, role, kv_cache_config)
        if groups is None:  # of other kinds: nothing is claimed
            self._hooks = []

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._states:
            self._states.manager = kv_cache_manager
