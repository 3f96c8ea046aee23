"""The scheduler's half of blending: which prompts are blended, and how many of their tokens are claimed."""

from __future__ import annotations

import time
from collections.abc import Sequence

from blendrag.engine.compat.connector import SchedulerStep, least_rows
from blendrag.engine.compat.groups import LayerGroup, common_block_size
from blendrag.engine.hooks import Asked, Orders, SchedulerHook
from blendrag.engine.wire.recipe import BlendOrder, read_recipe
from blendrag.engine.wire.report import BlendReport

# Requests that are blended, or next in line, at the same time as others run. Those behind them hold no blocks
# yet.
_BLENDS_AHEAD = 2

_REMEMBERED_S = 300.0


class BlendClaims(SchedulerHook):
    """The claims of prompts with a recipe. groups: of the model's layers. salted: whether each needs a salt,
    since prefix caching is on."""

    name = "blend"

    def __init__(self, groups: Sequence[LayerGroup], *, salted: bool) -> None:
        self._groups, self._block_size, self._salted = groups, common_block_size(groups), salted
        self._orders: list[BlendOrder] = []
        self._blending: set[str] = set()  # requests that the worker was told of, and has not finished
        self._memory = MemoryLimit()

    def arrived(self, asked: Asked) -> None:
        asked.recipe = read_recipe(asked.params)
        if asked.recipe and self._salted and not asked.salt:
            asked.refuse("salt", "no cache salt while prefix caching is on")
        elif asked.recipe and asked.computed_anyway:
            asked.refuse("recipe", "with prompt_logprobs, all of a prompt is computed")

    def claim(self, asked: Asked, computed: int) -> int | None:
        if asked.recipe is None:
            return 0
        claimed = self._claimed(asked)
        if claimed <= computed or 0 < asked.recipe.reused_end(claimed, self._block_size) <= computed:
            return 0
        # Rows behind a hit would look for KV that vLLM gives up: all of the prompt is blended anew, or none.
        anew = computed and any(group.gives_up(claimed) for group in self._groups)
        rows = claimed - asked.recipe.cached * (1 - asked.recipe.options.recompute_ratio)  # about
        if anew and rows >= claimed - computed:
            return 0
        if not self._memory.suffices(claimed):
            asked.refuse("memory", "a prompt that is no longer than this one has just run out of memory")
            return 0
        if len(self._blending) >= _BLENDS_AHEAD:
            return None  # it would hold its blocks, and do nothing with them
        return claimed - computed

    def _claimed(self, asked: Asked) -> int:
        assert asked.recipe is not None
        return asked.recipe.claim(asked.prompt, self._block_size, own=least_rows())

    def allocated(self, asked: Asked, block_ids: Sequence[list[int]], claimed: int) -> None:
        if asked.recipe is None or not claimed:
            return
        self._blending.add(asked.id)
        end, ids = self._claimed(asked), asked.ids(asked.prompt)
        room = min(len(held) * of.block_size for held, of in zip(block_ids, self._groups, strict=True))
        behind, (first, *others) = ids[end:] if len(ids) <= room else [], block_ids
        written, recipe, next_id = end - claimed, asked.recipe, next(iter(ids[end:]), 0)
        order = BlendOrder(asked.id, asked.ticket, ids[:end], first, written, recipe, behind, others, next_id)
        self._orders.append(order)

    def orders(self, step: SchedulerStep) -> Orders:
        orders, self._orders = self._orders, []
        return Orders(orders)

    def reported(self, asked: Asked, report: BlendReport) -> None:
        self._blending.discard(asked.id)
        if report.cause == "memory" and asked.recipe is not None:
            self._memory.ran_out(self._claimed(asked))

    def finished(self, request_id: str) -> None:
        self._blending.discard(request_id)


class MemoryLimit:
    """A limit on the length of blended prompts, for a while after one ran out of memory late in its work."""

    def __init__(self) -> None:
        self._tokens, self._until = 0, 0.0

    def ran_out(self, tokens: int) -> None:
        """Note that a prompt of so many tokens ran out of memory."""
        now = time.monotonic()
        self._tokens = min(tokens, self._tokens) if now < self._until else tokens
        self._until = now + _REMEMBERED_S

    def suffices(self, tokens: int) -> bool:
        """Return whether nothing is known against blending a prompt of so many tokens."""
        return tokens < self._tokens or time.monotonic() >= self._until
