"""What vLLM asks of a KV connector, and what a connector sees of its scheduler."""

from __future__ import annotations

from typing import Any, Self, TypeVar

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.sched.output import CachedRequestData

from blendrag.engine.compat.platform import is_cpu

Connector = TypeVar("Connector", bound=KVConnectorBase_V1)

__all__ = [
    "CachedRequestData",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "RequestBlocks",
    "evict_blocks",
    "least_rows",
    "own_connector",
    "takes_back_steps",
]


def own_connector(kind: type[Connector]) -> Connector:
    """The worker's one of this kind, alone or a child of vLLM's ``MultiConnector``."""
    group = get_kv_transfer_group()
    return next(one for one in getattr(group, "sub_connectors", [group]) if isinstance(one, kind))


def takes_back_steps(vllm_config: Any) -> bool:
    """Whether a step is undone right if KV that was promised for it turns out not to be there. Asynchronous
    scheduling keeps the place of the token that the step gave; the second model runner counts on from it."""
    scheduled_ahead = vllm_config.scheduler_config.async_scheduling
    return is_cpu() and not scheduled_ahead and not vllm_config.use_v2_model_runner


def least_rows() -> int:
    """Return how many rows of a prompt the engine's own forward is left: a CPU's kernels round a row that is
    alone in a step otherwise than one among others, as it is when the prompt comes again."""
    return 2 if is_cpu() else 1


def evict_blocks(pool: Any, block_ids: set[int]) -> None:
    """Nothing is found in these blocks any more, whoever has them. pool: vLLM's ``BlockPool``."""
    pool.evict_blocks(block_ids)


class RequestBlocks:
    """The blocks that vLLM's manager (``KVCacheManager``) holds for requests, in one group of layers. What is
    given back becomes the null block, as where vLLM's managers know windows: the list keeps its length, so
    that what follows, preemption and the end work as always."""

    def __init__(self, manager: Any, pool: Any) -> None:
        self._manager, self._pool = manager, pool

    @classmethod
    def of(cls, kv_cache_manager: Any) -> Self | None:
        """None if this vLLM's managers are others, or there is more than one."""
        coordinator = getattr(kv_cache_manager, "coordinator", None)
        managers: Any = getattr(coordinator, "single_type_managers", ())
        pool = getattr(kv_cache_manager, "block_pool", None)
        fits = len(managers) == 1 and hasattr(managers[0], "req_to_blocks")
        fits = fits and callable(getattr(managers[0], "_remove_blocks_in_range", None))
        return cls(managers[0], pool) if fits and callable(getattr(pool, "evict_blocks", None)) else None

    def ids(self, request_id: str) -> list[int]:
        return [block.block_id for block in self._manager.req_to_blocks[request_id]]

    def give_back(self, request_id: str, first_block: int, first: int, last: int) -> None:
        """Those between, of the request whose list begins with ``first_block``; none of it is found any more
        by its tokens."""
        blocks = self._manager.req_to_blocks.get(request_id)
        if not blocks or blocks[0].block_id != first_block:
            return
        self._pool.evict_blocks({block.block_id for block in blocks[:last]})
        self._manager._remove_blocks_in_range(request_id, first, last)
