"""The scheduler's half of eviction: when a prompt's KV is evicted, and how its blocks become free."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from blendrag.engine.compat.connector import RequestBlocks
from blendrag.engine.wire.recipe import EvictionOrder, Recipe
from blendrag.engine.wire.report import Eviction


class BlockFreeing:
    """The evictions of one scheduler. ``blocks``: None where a request's blocks are in several groups, or
    this vLLM has another manager; then nothing is evicted."""

    def __init__(self, blocks: RequestBlocks | None) -> None:
        self._blocks = blocks
        self._expected: dict[str, Any] = {}  # requests whose prompt is blended now, by id

    def expect(self, request: Any, recipe: Recipe) -> None:
        """Note a prompt that is blended. If its recipe asks for it, it is evicted once its first token is
        there."""
        if recipe.options.kv_budget is not None:
            self._expected[request.request_id] = request

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended, has failed, or has to be blended again."""
        self._expected.pop(request_id, None)

    def orders(self, scheduled: Collection[str]) -> list[EvictionOrder]:
        """Return an order to evict the KV of one request that this step goes on with, the first whose prompt
        is computed. Its first token has left already, so it does not wait for the choice of what is kept. The
        others get their turn in later steps, since all running requests wait for each eviction."""
        for request_id, request in self._expected.items():
            if request_id in scheduled and request.num_computed_tokens >= request.num_prompt_tokens:
                del self._expected[request_id]
                ticket = str(request.kv_transfer_params.get("ticket", ""))
                blocks = [] if self._blocks is None else self._blocks.ids(request_id)
                return [EvictionOrder(request_id, ticket, blocks, request.num_prompt_tokens)]
        return []

    def free(self, request_id: str, eviction: Eviction) -> None:
        """Give back the blocks that the worker has emptied. Those of a request that has ended since, or was
        preempted, are free already."""
        if self._blocks is not None and eviction.freed:
            self._blocks.give_back(request_id, eviction.first_block, eviction.first, eviction.last)
