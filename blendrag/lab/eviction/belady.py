"""The most that any policy could have found: it knows the future."""

from __future__ import annotations

from blendrag.errors import ConfigError
from blendrag.eviction.heap import IndexedHeap
from blendrag.lab.eviction.replay import ReplayOutcome
from blendrag.lab.eviction.trace import RequestTrace, events, looked_up, weights

_NEVER = float("inf")


def optimum(trace: RequestTrace, capacity: int) -> ReplayOutcome:
    """Return Belady's optimum: what is asked for latest leaves first, and what is never asked for again is
    not kept at all.

    Whoever asks for a block of a prefix cache asks for those before it, too, so that no block is held without
    them. Where chunks differ in size, parts of them may leave: that optimum can be computed, and no policy
    that holds chunks whole finds more tokens. Raises ConfigError for a capacity below 1.
    """
    if capacity < 1:
        raise ConfigError(f"a cache of {capacity} {trace.unit}: it must hold 1 or more")
    outcome = ReplayOutcome.empty(trace)
    held: dict[str, int] = {}  # of its weight, so much
    order = IndexedHeap()
    free = capacity
    for (number, over), nexts in zip(list(events(trace)), _next_lookups(trace), strict=True):
        request = trace.requests[number]
        sizes = weights(trace, request)
        count = len(nexts)
        if not over:
            found = [held.get(key, 0) for key in request.keys[:count]]
            outcome.found[number] = sum(
                whole * part // size
                for whole, part, size in zip(request.sizes, found, sizes, strict=False)
                if size
            )
        for depth in range(count - 1, -1, -1):
            key, when = request.keys[depth], nexts[depth]
            if when == _NEVER:
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
    order = list(events(trace))
    for place in range(len(order) - 1, -1, -1):
        number, over = order[place]
        request = trace.requests[number]
        keys = request.keys if over else request.keys[: looked_up(request)]
        answer.append([upcoming.get(key, _NEVER) for key in keys])
        if not over:
            upcoming.update(dict.fromkeys(keys, place))
    return answer[::-1]
