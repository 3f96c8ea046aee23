"""A trace, replayed through an eviction policy: the very object that a tier would ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blendrag.errors import ConfigError
from blendrag.eviction import EvictionPolicy, Use
from blendrag.lab.replay.costs import Costs
from blendrag.lab.replay.events import events, finished, looked_up, weights
from blendrag.lab.replay.request import Request, Trace

_CALLS = 256  # requests between two looks at whether anybody wants to stop


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Per request, [requests]: at, seconds; asked and found, tokens of its prompt; written, tokens that were
    brought into the cache for it; ttft_s, estimated."""

    at: NDArray[np.float64]
    asked: NDArray[np.int64]
    found: NDArray[np.int64]
    written: NDArray[np.int64]
    ttft_s: NDArray[np.float64]

    @classmethod
    def empty(cls, trace: Trace) -> Outcome:
        at = np.array([request.at for request in trace.requests], np.float64)
        asked = [sum(request.sizes[: looked_up(request)]) for request in trace.requests]
        nothing = np.zeros(len(at), np.int64)
        return cls(at, np.array(asked, np.int64), nothing, nothing.copy(), np.zeros(len(at)))


def replay(
    trace: Trace,
    policy: EvictionPolicy,
    capacity: int,
    *,
    forecasts: Sequence[float] | None = None,
    costs: Costs | None = None,
    tick: Callable[[int], None] = lambda requests: None,
) -> Outcome:
    """What a cache of ``capacity`` (in ``trace.unit``) would have found with a new ``policy``.

    A prefix cache finds the longest held prefix of a prompt, others each chunk by itself. forecasts: by
    request, the chance that its conversation goes on; told when the request is finished. tick: hears of
    requests done. Raises ConfigError for a capacity below 1.
    """
    if capacity < 1:
        raise ConfigError(f"a cache of {capacity} {trace.unit}: it must hold 1 or more")
    cache, costs, outcome = _Cache(trace, policy, capacity), costs or Costs(), Outcome.empty(trace)
    last: dict[int, tuple[list[bool], int, float | None]] = {}
    for number, over in events(trace):
        request = trace.requests[number]
        if over:
            found, known, cost = last.pop(number)
            outcome.written[number] = cache.keep(request, found, known, cost)
            if forecasts is not None and request.conversation is not None:
                cache.forecast(request, float(forecasts[number]))
            continue
        found, known = cache.look_up(request)
        tokens = sum(size for size, there in zip(request.sizes, found, strict=False) if there)
        fresh = int(outcome.asked[number]) - tokens
        outcome.found[number] = tokens
        outcome.ttft_s[number] = costs.ttft_s(tokens, fresh)
        last[number] = found, known, costs.per_token_s(tokens, fresh)
        if number % _CALLS == _CALLS - 1:
            tick(_CALLS)
    tick(len(trace.requests) % _CALLS)
    return outcome


class _Cache:
    """What is held, and nothing of why."""

    def __init__(self, trace: Trace, policy: EvictionPolicy, capacity: int) -> None:
        self._trace, self._policy, self._free = trace, policy, capacity
        self._held: dict[str, int] = {}
        self._seen: set[str] = set()

    def look_up(self, request: Request) -> tuple[list[bool], int]:
        """Which of the prompt's keys are found; how many of its leading ones were ever seen."""
        keys = request.keys[: looked_up(request)]
        known = next((depth for depth, key in enumerate(keys) if key not in self._seen), len(keys))
        self._seen.update(keys)
        if not self._trace.prefix:
            return [key in self._held for key in keys], known
        found = next((depth for depth, key in enumerate(keys) if key not in self._held), len(keys))
        return [depth < found for depth in range(len(keys))], known

    def keep(self, request: Request, found: list[bool], known: int, cost: float | None) -> int:
        """Tell the policy of the request's chunks, and hold them all if there is room; tokens written.

        From the last to the first, as vLLM frees blocks: where the policy makes no difference, the end of a
        prompt leaves before its beginning, without which it would be worth nothing. The request's own chunks
        are in use: those that the policy names before their turn are put aside until then.
        """
        at, length, written = finished(request), len(request.keys), 0
        depths = {key: depth for depth, key in reversed(list(enumerate(request.keys)))}
        aside: set[str] = set()
        sizes, similarities = weights(self._trace, request), request.similarities
        for depth in range(length - 1, -1, -1):
            key, size = request.keys[depth], sizes[depth]
            there = depth < len(found) and found[depth]
            likeness = similarities[depth] if similarities else 0.0
            use = Use(at, None if there else cost, depth, length, known, request.answered, likeness)
            if key in aside:
                aside.discard(key)
                self._policy.added(key, size, use)
            elif key in self._held:
                self._policy.used(key, use)
            elif self._make_room(size, lambda other: depths.get(other, length) < depth, aside):  # noqa: B023
                self._free -= size
                self._held[key] = size
                self._policy.added(key, size, use)
                written += request.sizes[depth]
        self._seen.update(request.keys)
        return written

    def forecast(self, request: Request, probability: float) -> None:
        """The chance that the request's conversation goes on."""
        assert request.conversation is not None
        at = finished(request)
        for key in reversed(request.keys):
            self._policy.forecast(key, probability, at, request.conversation)

    def _make_room(self, size: int, in_use: Callable[[str], bool], aside: set[str]) -> bool:
        while self._free < size:
            victim = self._policy.victim()
            if victim is None:
                return False
            self._policy.removed(victim)
            if in_use(victim):
                aside.add(victim)
            else:
                self._free += self._held.pop(victim)
        return True
