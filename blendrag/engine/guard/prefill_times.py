"""Both halves of timing the engine's own prefills, which the scheduler sees begin and end."""

from __future__ import annotations

import time
from typing import Any

from blendrag.control.guard import LEAST_TOKENS, LoadGuard
from blendrag.engine.compat.connector import SchedulerStep
from blendrag.engine.hooks import Asked, Orders, SchedulerHook, Step, WorkerHook


class PrefillTimes(SchedulerHook):
    """The times from the step in which a prompt's tokens are first computed to the one behind its first
    token's, where the engine computes enough of them itself."""

    name = "guard"

    def __init__(self) -> None:
        self._waiting: dict[str, Asked] = {}
        self._begun: dict[str, tuple[Asked, int, float]] = {}  # tokens to compute, since when
        self._ended: list[tuple[int, float]] = []

    def arrived(self, asked: Asked) -> None:
        self._waiting[asked.id] = asked

    def orders(self, step: SchedulerStep) -> Orders:
        for request_id in step.preempted:
            self._begun.pop(request_id, None)
        for request_id in [one for one, (asked, _, _) in self._begun.items() if asked.answered]:
            self._end(request_id)
        for request_id in self._waiting.keys() & step.tokens.keys():
            asked = self._waiting.pop(request_id)
            if (tokens := asked.prompt - asked.computed) >= LEAST_TOKENS:
                self._begun[request_id] = asked, tokens, time.perf_counter()
        ended, self._ended = self._ended, []
        return Orders(others=ended)

    def finished(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        if request_id in self._begun:
            self._end(request_id)

    def _end(self, request_id: str) -> None:
        asked, tokens, begin = self._begun.pop(request_id)
        if asked.answered:  # else it was given up
            self._ended.append((tokens, time.perf_counter() - begin))


class GuardTimes(WorkerHook):
    """The worker's half: it tells the guard."""

    name = "guard"

    def __init__(self, guard: LoadGuard) -> None:
        self._guard = guard

    def before_forward(self, step: Step) -> dict[str, Any]:
        for tokens, seconds in step.of(self.name).others:
            self._guard.prefilled(tokens, seconds)
        return {}
