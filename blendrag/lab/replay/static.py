"""The most that a policy can find which does not know the future, where requests do not depend on each other.

Whatever was asked before, a request then finds of the chunks that are held the expected tokens
sum of p * size, so that no choice finds more than the chunks with the highest p that fit: A0 of Aho, Denning
and Ullman (Principles of optimal page replacement, 1971). Policies may only come as close as they learn p.
"""

from __future__ import annotations

from collections.abc import Mapping

from blendrag.lab.replay.costs import Costs
from blendrag.lab.replay.request import Trace
from blendrag.lab.replay.run import Outcome


def static(trace: Trace, capacity: int, costs: Costs | None = None) -> Outcome:
    """A cache that holds the chunks of the highest probability from the beginning, and never another one.

    The last of them is held in part, so that this is the optimum for chunks that differ in size, too.
    capacity: tokens, 1 or more. ``popularity`` of the trace has to be known.
    """
    costs, outcome = costs or Costs(), Outcome.empty(trace)
    held = _held(trace, capacity)
    for number, request in enumerate(trace.requests):
        tokens = sum(held.get(key, 0) for key in request.keys)
        outcome.found[number] = tokens
        outcome.ttft_s[number] = costs.ttft_s(tokens, int(outcome.asked[number]) - tokens)
    return outcome


def _held(trace: Trace, capacity: int) -> Mapping[str, int]:
    """Tokens of each chunk that is held. What the trace never asks for takes the room that it would take."""
    held: dict[str, int] = {}
    for key, (_, size) in sorted(trace.popularity.items(), key=lambda item: -item[1][0]):
        held[key] = min(size, capacity)
        capacity -= held[key]
        if not capacity:
            break
    return held
