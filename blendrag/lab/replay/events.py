"""What happens to the cache in the course of a trace, in order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from blendrag.lab.replay.request import Request, Trace


def events(trace: Trace) -> Iterator[tuple[int, bool]]:
    """(number of the request, whether it is finished).

    A request is looked up when it arrives; what it used and what it made is kept when it is finished, as vLLM
    frees a request's blocks, and LPC inserts them (section 3.4.1). What is finished at a moment is found by
    what arrives at it.
    """
    running: list[tuple[float, int]] = []
    for number, request in enumerate(trace.requests):
        while running and running[0][0] <= request.at:
            yield heapq.heappop(running)[1], True
        yield number, False
        heapq.heappush(running, (finished(request), number))
    while running:
        yield heapq.heappop(running)[1], True


def finished(request: Request) -> float:
    """Seconds: when the request is over, as far as it is known; not before it arrives."""
    return request.at if request.finished is None else max(request.at, request.finished)


def looked_up(request: Request) -> int:
    """How many leading keys are the prompt's."""
    return len(request.keys) - request.answer


def weights(trace: Trace, request: Request) -> tuple[int, ...]:
    """What each key takes of the capacity: 1 where blocks are counted, its tokens elsewhere."""
    return (1,) * len(request.keys) if trace.unit == "blocks" else request.sizes
