"""Waiting requests in the order that pays: what is cached most, and computed least, first (RAGCache 5.2)."""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass


@dataclass(slots=True)
class _Waiting:
    number: int
    cached: int
    prompt: int
    overtaken: int = 0

    @property
    def priority(self) -> tuple[float, int]:
        """OrderPriority: cached length / computation length; of equals, the oldest first."""
        return self.cached / max(1, self.prompt - self.cached), -self.number


_priority = operator.attrgetter("priority")


class Reordering:
    """In the scheduler's process. window: so often a request is overtaken, at most.

    The scheduler asks for its waiting requests in the order of their arrival, and goes on to the next where
    one has to wait. So a step begins one of them, the best.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._waiting: dict[str, _Waiting] = {}  # oldest first
        self._best: _Waiting | None = None  # until it begins or ends: a step asks for each that waits
        self._numbers = itertools.count()
        self._refused = self._begun = self._free = False  # in this step; for the next one to ask

    def arrived(self, request_id: str, cached: int, prompt: int) -> None:
        """cached: tokens of the prompt that are known to be in the tree."""
        own = self._waiting[request_id] = _Waiting(next(self._numbers), cached, prompt)
        self._compare(own)

    def may_begin(self, request_id: str, computed: int) -> bool:
        """Asked in a step, for a request whose first ``computed`` tokens the engine has."""
        own = self._waiting.get(request_id)
        if own is None:  # it has begun before, and was preempted
            return True
        if computed > own.cached:
            own.cached = computed
            self._compare(own)
        if own is self._first() or self._free:
            self._free = False
            return True
        self._refused = True
        return False

    def _first(self) -> _Waiting:
        oldest = next(iter(self._waiting.values()))
        if oldest.overtaken >= self._window:
            return oldest
        if self._best is None:
            self._best = max(self._waiting.values(), key=_priority)
        return self._best

    def _compare(self, own: _Waiting) -> None:
        """Its priority is a new one, or a higher one than before."""
        if self._best is not None:
            self._best = max(self._best, own, key=_priority)

    def _leave(self, request_id: str) -> None:
        if self._waiting.pop(request_id, None) is self._best:
            self._best = None

    def began(self, request_id: str) -> None:
        """It has its blocks: those that are older were overtaken."""
        if request_id not in self._waiting:
            return
        for other, waiting in self._waiting.items():
            if other == request_id:
                break
            waiting.overtaken += 1
        self._leave(request_id)
        self._begun = True

    def ended(self, request_id: str) -> None:
        """Also before it began."""
        self._leave(request_id)

    def step_over(self) -> None:
        """Where the best could not begin (its grammar is not ready, perhaps), the next step takes whoever is
        asked for first: nobody waits for one that waits itself."""
        self._free = self._refused and not self._begun
        self._refused = self._begun = False
