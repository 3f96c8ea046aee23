"""A trace, replayed through an eviction policy: the very object that a tier would ask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from blendrag.control.estimate import PrefillCurve
from blendrag.errors import ConfigError
from blendrag.eviction import EvictionPolicy, Use
from blendrag.lab.eviction.trace import Request, RequestTrace, events, finished, looked_up, weights

# Not measured: Llama-3.1-8B on an A100 at half its 312 TFLOPS, which is 16 GFLOP a token and 0.52 MFLOP a
# pair that attends. It tells PGDSF which chunks are dear.
_PREFILL = PrefillCurve((0.0, 1.0e-4, 3.4e-9), (0,), (1,), ((1.0,),))


@dataclass(frozen=True, slots=True, eq=False)
class ReplayOutcome:
    """The outcome of a replay, per request, [requests]: asked and found, tokens of its prompt. held: keys
    that are left in the end."""

    asked: NDArray[np.int64]
    found: NDArray[np.int64]
    held: set[str] = field(default_factory=set)

    @classmethod
    def empty(cls, trace: RequestTrace) -> ReplayOutcome:
        asked = [sum(request.sizes[: looked_up(request)]) for request in trace.requests]
        return cls(np.array(asked, np.int64), np.zeros(len(asked), np.int64))

    def hit_ratio(self, first: int = 0) -> float:
        """Return tokens found per token asked, from request ``first`` on."""
        return float(self.found[first:].sum() / max(1, self.asked[first:].sum()))


def replay(
    trace: RequestTrace, policy: EvictionPolicy, capacity: int, *, forecasts: Sequence[float] | None = None
) -> ReplayOutcome:
    """Return what a cache of ``capacity`` (in ``trace.unit``) would have found with a new ``policy``.

    A prefix cache finds the longest held prefix of a prompt, others each chunk by itself. forecasts: by
    request, the chance that its conversation goes on; told when the request is finished. Raises ConfigError
    for a capacity below 1.
    """
    if capacity < 1:
        raise ConfigError(f"a cache of {capacity} {trace.unit}: it must hold 1 or more")
    cache, outcome = _Cache(trace, policy, capacity), ReplayOutcome.empty(trace)
    last: dict[int, tuple[list[bool], int, float | None]] = {}
    for number, over in events(trace):
        request = trace.requests[number]
        if over:
            cache.keep(request, *last.pop(number))
            if forecasts is not None and request.conversation is not None:
                cache.forecast(request, float(forecasts[number]))
            continue
        found, known = cache.look_up(request)
        tokens = sum(size for size, there in zip(request.sizes, found, strict=False) if there)
        outcome.found[number] = tokens
        last[number] = found, known, prefill_cost(tokens, int(outcome.asked[number]) - tokens)
    outcome.held.update(cache.held)
    return outcome


def prefill_cost(cached: int, fresh: int) -> float | None:
    """Return Cost_i / NewSize_i of a request (RAGCache eq. 3), seconds; None where nothing is computed."""
    return _PREFILL.seconds(cached, fresh) / fresh if fresh > 0 else None


class _Cache:
    """A cache that knows what is held, and nothing of why."""

    def __init__(self, trace: RequestTrace, policy: EvictionPolicy, capacity: int) -> None:
        self._trace, self._policy, self._free = trace, policy, capacity
        self.held: dict[str, int] = {}
        self._seen: set[str] = set()
        self._children: Counter[str] = Counter()  # of a tree's nodes, how many are held
        self._parents: dict[str, str] = {}

    def look_up(self, request: Request) -> tuple[list[bool], int]:
        """Return which of the prompt's keys are found, and how many of its leading ones were ever seen."""
        keys = request.keys[: looked_up(request)]
        known = next((depth for depth, key in enumerate(keys) if key not in self._seen), len(keys))
        self._seen.update(keys)
        if not self._trace.prefix:
            return [key in self.held for key in keys], known
        found = next((depth for depth, key in enumerate(keys) if key not in self.held), len(keys))
        return [depth < found for depth in range(len(keys))], known

    def keep(self, request: Request, found: list[bool], known: int, cost: float | None) -> None:
        """Tell the policy of the request's chunks, and hold them all if there is room.

        From the last to the first, as vLLM frees blocks: where the policy makes no difference, the end of a
        prompt leaves before its beginning, without which it would be worth nothing. The request's own chunks
        are in use: those that the policy names before their turn are put aside until then.
        """
        if self._trace.tree:
            self._grow(request, found, known, cost)
            return
        at, length = finished(request), len(request.keys)
        depths = {key: depth for depth, key in reversed(list(enumerate(request.keys)))}
        aside: set[str] = set()
        sizes = weights(self._trace, request)
        for depth in range(length - 1, -1, -1):
            key, size = request.keys[depth], sizes[depth]
            there = depth < len(found) and found[depth]
            use = Use(at, None if there else cost, depth, length, known)
            if key in aside:
                aside.discard(key)
                self._policy.added(key, size, use)
            elif key in self.held:
                self._policy.used(key, use)
            elif self._make_room(size, lambda other: depths.get(other, length) < depth, aside):  # noqa: B023
                self._free -= size
                self.held[key] = size
                self._policy.added(key, size, use)
        self._seen.update(request.keys)

    def _grow(self, request: Request, found: list[bool], known: int, cost: float | None) -> None:
        """Keep nodes as a tree does: what was found is used, from its end on; what was seen before comes,
        each node behind its parent, in place of other leaves."""
        keys, sizes = request.keys, weights(self._trace, request)
        uses = [
            Use(finished(request), None if there else cost, depth, len(keys), known)
            for depth, there in enumerate(found)
        ]
        for depth in reversed(range(sum(found))):
            self._policy.used(keys[depth], uses[depth])
        for depth in range(known):
            key, parent = keys[depth], keys[depth - 1] if depth else ""
            if key in self.held:
                continue
            if (parent and parent not in self.held) or not self._make_room_behind(parent, sizes[depth]):
                return
            self._free -= sizes[depth]
            self.held[key], self._parents[key] = sizes[depth], parent
            self._children[parent] += 1
            self._policy.added(key, sizes[depth], uses[depth])

    def _make_room_behind(self, parent: str, size: int) -> bool:
        while self._free < size:
            victim = self._policy.victim(lambda key: not self._children[key] and key != parent)
            if victim is None:
                return False
            self._policy.removed(victim)
            self._free += self.held.pop(victim)
            self._children[self._parents.pop(victim)] -= 1
        return True

    def forecast(self, request: Request, probability: float) -> None:
        """Say that the request's conversation goes on with this chance."""
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
                self._free += self.held.pop(victim)
        return True
