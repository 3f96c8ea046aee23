"""The interface of vLLM's KV connectors, and what a connector sees of its scheduler."""

from __future__ import annotations

from typing import Any, Self, TypeVar

import torch
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
    "least_rows",
    "own_connector",
]


def own_connector(kind: type[Connector]) -> Connector:
    """Return the worker's connector of this kind, alone or a child of vLLM's ``MultiConnector``."""
    group = get_kv_transfer_group()
    return next(one for one in getattr(group, "sub_connectors", [group]) if isinstance(one, kind))


def least_rows() -> int:
    """Return how many rows of a prompt are left to the engine's own forward, at least.

    A CPU's matrix products round a few rows (up to eleven with AVX2) differently than many. A prompt has to
    get the same answer whether it is blended, prefilled or found in the prefix cache.
    """
    if not is_cpu():
        return 1
    return 2 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 12


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

    def ids(self, request_id: str) -> list[int]:
        return [block.block_id for block in self._manager.req_to_blocks[request_id]]

    def give_back(self, request_id: str, first_block: int, first: int, last: int) -> None:
        """Give back blocks [first, last) of a request, if its list still begins with ``first_block``. None of
        its blocks before ``last`` can be found by their tokens any more."""
        blocks = self._manager.req_to_blocks.get(request_id)
        if not blocks or blocks[0].block_id != first_block:
            return
        self._pool.evict_blocks({block.block_id for block in blocks[:last]})
        self._manager._remove_blocks_in_range(request_id, first, last)
