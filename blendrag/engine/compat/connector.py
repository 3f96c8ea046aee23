"""The interface of vLLM's KV connectors, and what a connector sees of its scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.sched.output import CachedRequestData

from blendrag.engine.compat.platform import is_cpu

Connector = TypeVar("Connector", bound=KVConnectorBase_V1)

# vLLM's own names that other packages import from here.
__all__ = [
    "CachedRequestData", "KVConnectorBase_V1", "KVConnectorMetadata", "KVConnectorPromMetrics",
    "KVConnectorRole", "KVConnectorStats", "KVConnectorWorkerMetadata", "SupportsHMA",
]  # fmt: skip


def own_connector(kind: type[Connector]) -> Connector | None:
    """Return the worker's connector of this kind, alone or a child of vLLM's ``MultiConnector``, if there is
    one."""
    group = get_kv_transfer_group() if has_kv_transfer_group() else None
    return next((one for one in getattr(group, "sub_connectors", [group]) if isinstance(one, kind)), None)


def least_rows() -> int:
    """Return how many rows of a prompt are left to the engine's own forward, at least.

    A CPU's matrix products round a few rows (up to eleven with AVX2) differently than many. A prompt has to
    get the same answer whether it is blended, prefilled or found in the prefix cache.
    """
    if not is_cpu():
        return 1
    return 2 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 12


class Transfer(NamedTuple):
    """The part of vLLM's configuration that a connector reads. options: the connector's own."""

    options: dict[str, Any]
    block_size: int
    prefix_caching: bool

    @classmethod
    def of(cls, vllm_config: Any) -> Self:
        cache, options = vllm_config.cache_config, vllm_config.kv_transfer_config.kv_connector_extra_config
        return cls(options, int(cache.block_size), bool(cache.enable_prefix_caching))


@dataclass(slots=True)
class SchedulerRequest:
    """A request as vLLM's scheduler has it (``Request``)."""

    request: Any

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def params(self) -> dict[str, Any] | None:
        """Return the parameters for connectors that its client has sent."""
        return self.request.kv_transfer_params

    def drop_params(self) -> None:
        """Have nobody look into these parameters any more."""
        self.request.kv_transfer_params = None

    @property
    def salt(self) -> str | None:
        return self.request.cache_salt

    @property
    def prompt(self) -> int:
        """Return how many tokens its prompt has."""
        return self.request.num_prompt_tokens

    @property
    def computed(self) -> int:
        """Return how many of its tokens were computed by the steps before this one."""
        return self.request.num_computed_tokens

    @property
    def preempted(self) -> bool:
        """Return whether it has lost its blocks, and is scheduled again."""
        return self.request.num_preemptions > 0

    @property
    def answered(self) -> bool:
        """Return whether its first token is known."""
        return bool(self.request.num_output_tokens)

    @property
    def computed_anyway(self) -> bool:
        """Return whether all of its prompt is computed, whatever is claimed: its log probabilities are asked
        for."""
        return bool(getattr(self.request, "skip_reading_prefix_cache", False))

    def ids(self, end: int) -> list[int]:
        """Return its first ``end`` token ids."""
        return list(self.request.all_token_ids[:end])


@dataclass(frozen=True, slots=True)
class SchedulerStep:
    """A step as vLLM's scheduler has decided it (``SchedulerOutput``)."""

    output: Any

    @property
    def tokens(self) -> Mapping[str, int]:
        """Return how many tokens are computed, by request."""
        return self.output.num_scheduled_tokens

    @property
    def ended(self) -> frozenset[str]:
        return frozenset(self.output.finished_req_ids)

    @property
    def preempted(self) -> frozenset[str]:
        return frozenset(self.output.preempted_req_ids or ())

    def more_blocks(self) -> Iterator[tuple[str, list[int]]]:
        """Return the blocks that running requests get besides those they have, in their one group of
        layers."""
        cached: CachedRequestData = self.output.scheduled_cached_reqs
        for request_id, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new and request_id not in cached.resumed_req_ids:
                yield request_id, new[0]


def block_ids_of(blocks: Any) -> list[list[int]]:
    """Return the ids of the blocks (``KVCacheBlocks``) that a request has in each group of layers."""
    return [list(ids) for ids in blocks.get_block_ids()]


def transfer_results(arrived: set[str], failed: set[str]) -> Any:
    """Return the requests whose loads have ended, and those of them without what was to be loaded, as vLLM
    takes them of connectors of several groups of layers."""
    return base.KVConnectorTransferResults(finished_recving=arrived, failed_recving=failed)


def message_of_workers(connector_output: Any) -> Any:
    """Return the workers' message in their output of a step (``KVConnectorOutput``)."""
    return connector_output.kv_connector_worker_meta


class RequestBlocks:
    """The blocks that vLLM's manager (``KVCacheManager``) holds for requests, in one group of layers. A block
    that is given back becomes the null block, as with vLLM's managers of windows: the list keeps its length,
    so later allocation, preemption and the end work as always."""

    def __init__(self, manager: Any, pool: Any) -> None:
        self._manager, self._pool = manager, pool

    @classmethod
    def of(cls, kv_cache_manager: Any) -> Self | None:
        """Return the blocks, or None if this vLLM has managers of another kind, or several."""
        coordinator = getattr(kv_cache_manager, "coordinator", None)
        managers: Any = getattr(coordinator, "single_type_managers", ())
        pool = getattr(kv_cache_manager, "block_pool", None)
        fits = len(managers) == 1 and hasattr(managers[0], "req_to_blocks")
        fits = fits and callable(getattr(managers[0], "_remove_blocks_in_range", None))
        return cls(managers[0], pool) if fits and callable(getattr(pool, "evict_blocks", None)) else None

    def withdraw(self, request_id: str) -> list[int]:
        """Return a request's blocks, none of which can be found by its tokens from now on."""
        ids = [block.block_id for block in self._manager.req_to_blocks[request_id]]
        self._pool.evict_blocks(set(ids))
        return ids

    def give_back(self, request_id: str, first_block: int, first: int, last: int) -> None:
        """Give back blocks [first, last) of a request, if its list still begins with ``first_block``."""
        blocks = self._manager.req_to_blocks.get(request_id)
        if blocks and blocks[0].block_id == first_block:
            self._manager._remove_blocks_in_range(request_id, first, last)
