"""The scheduler's half of eviction: when a prompt's KV is evicted, and that its blocks become free."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from blendrag.engine.compat.connector import RequestBlocks
from blendrag.engine.recipe import EvictionOrder, Recipe
from blendrag.engine.report import Eviction


class BlockFreeing:
    """Of one scheduler. ``blocks``: None where a request's are in several groups, or this vLLM's manager is
    another one: nothing is evicted."""

    def __init__(self, blocks: RequestBlocks | None) -> None:
        self._blocks = blocks
        self._expected: dict[str, Any] = {}  # requests whose prompt is blended now, by id

    def expect(self, request: Any, recipe: Recipe) -> None:
        """A prompt that is blended: evicted once its first token is there, if that is asked for."""
        if recipe.options.kv_budget is not None:
            self._expected[request.request_id] = request

    def forget(self, request_id: str) -> None:
        """It has ended, or has failed, or has to be blended again."""
        self._expected.pop(request_id, None)

    def orders(self, scheduled: Collection[str]) -> list[EvictionOrder]:
        """The first request whose prompt was computed, of a step that goes on with these: its first token has
        left, and does not wait for the choice of what is kept. The others' turn comes in later steps: all
        that are running wait for each."""
        for request_id, request in self._expected.items():
            if request_id in scheduled and request.num_computed_tokens >= request.num_prompt_tokens:
                del self._expected[request_id]
                ticket = str(request.kv_transfer_params.get("ticket", ""))
                blocks = [] if self._blocks is None else self._blocks.ids(request_id)
                return [EvictionOrder(request_id, ticket, blocks, request.num_prompt_tokens)]
        return []

    def free(self, request_id: str, eviction: Eviction) -> None:
        """Give the blocks back that the worker has emptied. Those of a request that has ended since, or was
        preempted, are free already."""
        if self._blocks is not None and eviction.freed:
            self._blocks.give_back(request_id, eviction.first_block, eviction.first, eviction.last)
