"""A trace, replayed through an eviction policy, the very object that a tier would ask; and the most that any
policy could have found, which knows the future."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.typing import NDArray

from blendrag.control.estimate import PrefillCurve
from blendrag.eviction import EvictionPolicy, Use
from blendrag.eviction.heap import IndexedHeap
from blendrag.eviction.interface import MayLeave
from blendrag.lab.eviction.trace import Request, RequestTrace

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
    def begin(cls, trace: RequestTrace) -> ReplayOutcome:
        """Return an outcome in which nothing is found yet."""
        asked = [sum(request.sizes[: len(request.asked)]) for request in trace.requests]
        return cls(np.array(asked, np.int64), np.zeros(len(asked), np.int64))

    def hit_ratio(self, first: int = 0) -> float:
        """Return tokens found per token asked, from request ``first`` on."""
        return float(self.found[first:].sum() / max(1, self.asked[first:].sum()))


def replay(
    trace: RequestTrace, policy: EvictionPolicy, capacity: int, *, forecasts: Sequence[float] | None = None
) -> ReplayOutcome:
    """Return what a cache of ``capacity`` (1 or more, in ``trace.unit``) would have found with a new policy.

    A prefix cache finds the longest held prefix of a prompt, others each chunk by itself. forecasts: by
    request, the chance that its conversation goes on; told when the request is over.
    """
    outcome, cache = ReplayOutcome.begin(trace), _Cache(trace, policy, capacity)
    last: dict[int, tuple[list[bool], int, float | None]] = {}
    for number, over in trace.events():
        request = trace.requests[number]
        if over:
            cache.keep(request, *last.pop(number))
            if forecasts is not None and request.conversation is not None:
                for key in reversed(request.keys):
                    policy.forecast(key, float(forecasts[number]), request.over, request.conversation)
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
        self._trace, self._policy = trace, policy
        self._capacity = self._free = capacity
        self.held: dict[str, int] = {}
        self._seen: set[str] = set()
        self._children: Counter[str] = Counter()  # of a tree's nodes, how many are held
        self._parents: dict[str, str] = {}

    def look_up(self, request: Request) -> tuple[list[bool], int]:
        """Return which of the prompt's keys are found, and how many of its leading ones were ever seen."""
        keys = request.asked
        known = next((depth for depth, key in enumerate(keys) if key not in self._seen), len(keys))
        self._seen.update(keys)
        if not self._trace.prefix:
            return [key in self.held for key in keys], known
        found = next((depth for depth, key in enumerate(keys) if key not in self.held), len(keys))
        return [depth < found for depth in range(len(keys))], known

    def keep(self, request: Request, found: list[bool], known: int, cost: float | None) -> None:
        """Tell the policy of the request's chunks, and hold them all if there is room.

        From the last to the first, as vLLM frees blocks: where the policy makes no difference, the end of a
        prompt leaves before its beginning, without which it would be worth nothing. Those whose turn has not
        come are in use, and stay.
        """
        keys, sizes, at = request.keys, self._trace.weights(request), request.over
        there = [*found, *[False] * request.answer]
        uses = [Use(at, None if own else cost, depth, len(keys), known) for depth, own in enumerate(there)]
        if self._trace.tree:
            self._grow(keys, sizes, uses, sum(found), known)
            return
        in_use = Counter(keys)
        for key, size, use in reversed(list(zip(keys, sizes, uses, strict=True))):
            in_use[key] -= 1
            if key in self.held:
                self._policy.used(key, use)
            elif self._make_room(size, lambda other: not in_use[other]):
                self._hold(key, size, use)
        self._seen.update(keys)

    def _grow(
        self, keys: Sequence[str], sizes: Sequence[int], uses: Sequence[Use], found: int, known: int
    ) -> None:
        """Keep nodes as a tree does: what was found is used, from its end on; what was seen before comes,
        each node behind its parent, in place of other leaves."""
        for depth in reversed(range(found)):
            self._policy.used(keys[depth], uses[depth])
        for depth in range(known):
            key, parent = keys[depth], keys[depth - 1] if depth else ""
            if key in self.held:
                continue
            if parent and parent not in self.held:
                return
            self._children[parent] += 1  # from here on it stays
            if not self._make_room(sizes[depth], lambda other: not self._children[other]):
                self._children[parent] -= 1
                return
            self._parents[key] = parent
            self._hold(key, sizes[depth], uses[depth])

    def _hold(self, key: str, size: int, use: Use) -> None:
        self._free -= size
        self.held[key] = size
        self._policy.added(key, size, use)

    def _make_room(self, size: int, may_leave: MayLeave) -> bool:
        if size > self._capacity:  # a tier refuses it, and keeps what it has
            return False
        while self._free < size:
            victim = self._policy.victim(may_leave)
            if victim is None:
                return False
            self._policy.removed(victim)
            self._free += self.held.pop(victim)
            if self._trace.tree:
                self._children[self._parents.pop(victim)] -= 1
        return True


def optimum(trace: RequestTrace, capacity: int) -> ReplayOutcome:
    """Return Belady's optimum: what is asked for latest leaves first, and what is never asked for again is
    not kept at all.

    Whoever asks for a block of a prefix cache asks for those before it, too, so that no block is held without
    them. Where chunks differ in size, parts of them may leave: that optimum can be computed, and no policy
    that holds chunks whole finds more tokens.
    """
    outcome = ReplayOutcome.begin(trace)
    held: dict[str, int] = {}  # of its weight, so much
    order = IndexedHeap()
    free = capacity
    for (number, over), nexts in zip(trace.events(), _next_lookups(trace), strict=True):
        request = trace.requests[number]
        sizes = trace.weights(request)
        if not over:
            outcome.found[number] = sum(
                whole * held.get(key, 0) // size
                for key, whole, size in zip(request.asked, request.sizes, sizes, strict=False)
                if size
            )
        for depth in range(len(nexts) - 1, -1, -1):
            key, when = request.keys[depth], nexts[depth]
            if when == inf:
                free += held.pop(key, 0)
                order.remove(key)
            elif over or key in held:
                part = held.get(key, 0)
                if over and part < sizes[depth]:
                    free -= sizes[depth] - part
                    held[key] = sizes[depth]
                order.push(key, -when)
        while free < 0:
            first = order.peek()
            assert first is not None
            part = min(-free, held[first[0]])
            free += part
            held[first[0]] -= part
            if not held[first[0]]:
                del held[first[0]]
                order.remove(first[0])
    return outcome


def _next_lookups(trace: RequestTrace) -> list[list[float]]:
    """Return for each event, for each key that it is about, at which later event it is looked up next."""
    upcoming: dict[str, float] = {}
    answer: list[list[float]] = []
    for place, (number, over) in reversed(list(enumerate(trace.events()))):
        request = trace.requests[number]
        keys = request.keys if over else request.asked
        answer.append([upcoming.get(key, inf) for key in keys])
        if not over:
            upcoming.update(dict.fromkeys(keys, place))
    return answer[::-1]
