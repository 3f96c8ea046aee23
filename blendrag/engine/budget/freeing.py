"""The scheduler's half of eviction: when a prompt's KV is evicted, and how its blocks become free."""

from __future__ import annotations

from collections.abc import Sequence

from blendrag.engine.compat.connector import RequestBlocks, SchedulerStep
from blendrag.engine.hooks import Asked, Orders, SchedulerHook
from blendrag.engine.wire.recipe import EvictionOrder
from blendrag.engine.wire.report import BlendReport, Eviction, Tally


class BlockFreeing(SchedulerHook):
    """The evictions of one scheduler. Where no blocks are bound, nothing is evicted."""

    name = "budget"

    def __init__(self) -> None:
        self._blocks: RequestBlocks | None = None
        self._expected: dict[str, Asked] = {}  # requests whose prompt is blended now

    def bind(self, blocks: RequestBlocks | None) -> None:
        self._blocks = blocks

    def allocated(self, asked: Asked, block_ids: Sequence[list[int]], claimed: int) -> None:
        """Note a blended prompt whose recipe has it evicted once its first token is there."""
        if claimed and asked.recipe is not None and asked.recipe.options.kv_budget is not None:
            self._expected[asked.id] = asked

    def reported(self, asked: Asked, report: BlendReport) -> None:
        if report.fallback:
            self.finished(asked.id)

    def finished(self, request_id: str) -> None:
        self._expected.pop(request_id, None)

    def orders(self, step: SchedulerStep) -> Orders:
        """Return an order to evict the KV of one request that this step goes on with, the first whose prompt
        is computed. Its first token has left already, so it does not wait for the choice of what is kept. The
        others get their turn in later steps, since all running requests wait for each eviction."""
        for request_id, asked in self._expected.items():
            if request_id in step.tokens and asked.computed >= asked.prompt:
                del self._expected[request_id]
                # Withdrawn at once: the next step may be planned, and preempt it, before the worker reports.
                blocks = [] if self._blocks is None else self._blocks.withdraw(request_id)
                return Orders(others=[EvictionOrder(request_id, asked.ticket, blocks, asked.prompt)])
        return Orders()

    def received(self, request_id: str, eviction: Eviction, asked: Asked | None) -> Tally:
        """Give back the blocks that the worker emptied, unless the request has ended or was preempted."""
        if self._blocks is not None and eviction.freed:
            self._blocks.give_back(request_id, eviction.first_block, eviction.first, eviction.last)
        if asked is not None and asked.result is not None:
            asked.result = asked.result.evicted(eviction)
        return of_eviction(eviction)


def of_eviction(eviction: Eviction) -> Tally:
    """Return what the eviction of one prompt's KV adds to the counts."""
    if eviction.whole is not None:
        return {"blendrag_evictions": {"whole": 1}}
    return {
        "blendrag_evictions": {"evicted": 1},
        "blendrag_evicted_blocks": {"kept": eviction.first + 1, "freed": eviction.freed},
    }
