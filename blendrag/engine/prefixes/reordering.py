"""The order of waiting requests: those with most cached and least to compute come first (RAGCache 5.2)."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from blendrag.engine.compat.connector import SchedulerStep
from blendrag.engine.hooks import Asked, Orders, SchedulerHook
from blendrag.engine.prefixes.prefix_claims import held_tokens


@dataclass(slots=True)
class _Waiting:
    number: int
    cached: int
    prompt: int
    overtaken: int = 0

    @property
    def priority(self) -> tuple[float, int]:
        """Return OrderPriority: cached length / computation length; of equals, the oldest first."""
        return self.cached / max(1, self.prompt - self.cached), -self.number


_priority = operator.attrgetter("priority")


class ReorderedClaims(SchedulerHook):
    """The turns of requests that are not blended. window: how often one may be overtaken.

    The scheduler asks for its waiting requests in the order of their arrival, and goes on to the next where
    one has to wait. So a step begins one of them: the best.
    """

    name = "reordering"

    def __init__(self, window: int) -> None:
        self._window = window
        self._waiting: dict[str, _Waiting] = {}  # oldest first
        self._best: _Waiting | None = None  # until it begins or ends: a step asks about every waiting request
        self._numbers = itertools.count()
        self._refused = self._begun = self._free = False  # in this step; for the next request asked about

    def arrived(self, asked: Asked) -> None:
        if asked.recipe is None:
            own = _Waiting(next(self._numbers), held_tokens(asked), asked.prompt)
            self._waiting[asked.id] = own
            self._compare(own)

    def claim(self, asked: Asked, computed: int) -> int | None:
        own = self._waiting.get(asked.id) if asked.plain else None
        if own is None:  # it is not plain, or has begun before and was preempted
            return 0
        if computed > own.cached:
            own.cached = computed
            self._compare(own)
        if own is self._first() or self._free:
            self._free = False
            return 0
        self._refused = True
        return None

    def _first(self) -> _Waiting:
        oldest = next(iter(self._waiting.values()))
        if oldest.overtaken >= self._window:
            return oldest
        if self._best is None:
            self._best = max(self._waiting.values(), key=_priority)
        return self._best

    def _compare(self, own: _Waiting) -> None:
        """Make the request the best one if its priority, which is new or has risen, is the highest."""
        if self._best is not None:
            self._best = max(self._best, own, key=_priority)

    def allocated(self, asked: Asked, block_ids: Sequence[list[int]], claimed: int) -> None:
        if asked.id not in self._waiting:
            return
        for other, waiting in self._waiting.items():
            if other == asked.id:
                break
            waiting.overtaken += 1
        self.finished(asked.id)
        self._begun = True

    def orders(self, step: SchedulerStep) -> Orders:
        """End the step. If the best request could not begin (its grammar is not ready, perhaps), the next
        step takes the first request that is asked about, so none waits for one that is itself waiting."""
        self._free = self._refused and not self._begun
        self._refused = self._begun = False
        return Orders()

    def finished(self, request_id: str) -> None:
        if self._waiting.pop(request_id, None) is self._best:
            self._best = None
