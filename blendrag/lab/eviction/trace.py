"""Requests, of which every trace and every generated workload is made, and what happens to a cache in its
course."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, as the cache sees it.

    at: seconds since the trace began. keys: of its blocks or chunks, in the prompt's order. sizes: in
        tokens.
    answer: so many of the last keys are not looked up: they are the answer's, kept when it is finished.
    finished: seconds, when that is; ``at`` where it is unknown.
    conversation, prompts, continues: whose turn this is, the user's prompts so far with this one last, and
        whether another turn follows. The last is for the oracle alone.
    """

    at: float
    keys: tuple[str, ...]
    sizes: tuple[int, ...]
    answer: int = 0
    finished: float | None = None
    conversation: str | None = None
    prompts: tuple[str, ...] = ()
    continues: bool | None = None


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Requests in the order of their arrival.

    prefix: whether a key is of use only if all keys before it in the prompt are found too (a prefix cache),
        or by itself (retrieved chunks, whose KV is blended).
    unit: what capacities are counted in: "blocks" or "tokens".
    tree: a prefix cache whose keys are nodes of a tree of exact prefixes: only leaves leave, and a node is
        kept from its second sighting on.
    """

    name: str
    requests: Sequence[Request]
    prefix: bool
    unit: str
    tree: bool = False


def events(trace: RequestTrace) -> Iterator[tuple[int, bool]]:
    """Yield (number of the request, whether it is finished).

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
    """Return in seconds when the request is over, as far as it is known; not before it arrives."""
    return request.at if request.finished is None else max(request.at, request.finished)


def looked_up(request: Request) -> int:
    """Return how many leading keys are the prompt's."""
    return len(request.keys) - request.answer


def weights(trace: RequestTrace, request: Request) -> tuple[int, ...]:
    """Return what each key takes of the capacity: 1 where blocks are counted, its tokens elsewhere."""
    return (1,) * len(request.keys) if trace.unit == "blocks" else request.sizes
