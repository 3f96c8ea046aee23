"""What a trace teaches about when chunks are used again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blendrag.eviction import Use
from blendrag.eviction.history import FEATURES, History
from blendrag.lab.replay.events import events, finished, looked_up
from blendrag.lab.replay.request import Trace


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """Uses of chunks, in the order in which the policy hears of them.

    features: [n, len(FEATURES)], as the policy sees them. at: [n] seconds. next: [n] seconds until the chunk
    is asked for again; inf: never, as far as the trace goes. weights: [n]; chunks of one prompt share their
    fate in a prefix cache, so that n of them count like sqrt(n) uses. until: when the trace ends, seconds.
    """

    features: NDArray[np.float64]
    at: NDArray[np.float64]
    next: NDArray[np.float64]
    weights: NDArray[np.float64]
    until: float

    def before(self, until: float) -> Uses:
        """What was known at that time."""
        early = self.at < until
        after = np.where(self.at + self.next < until, self.next, np.inf)
        return Uses(self.features[early], self.at[early], after[early], self.weights[early], until)

    def since(self, start: float) -> Uses:
        """The uses from that time on."""
        late = self.at >= start
        return Uses(self.features[late], self.at[late], self.next[late], self.weights[late], self.until)


def uses_of(trace: Trace, forecasts: Sequence[float] | None = None) -> Uses:
    """All uses in a trace. forecasts: by request, the chance that its conversation goes on; from a predictor
    that did not learn from these conversations."""
    history = History(most=2**62)
    seen: set[str] = set()
    known: dict[int, int] = {}
    last: dict[str, int] = {}
    features: list[tuple[float, ...]] = []
    times: list[float] = []
    after: list[float] = []
    weights: list[float] = []
    for number, over in events(trace):
        request = trace.requests[number]
        if not over:
            asked = request.keys[: looked_up(request)]
            known[number] = next((i for i, key in enumerate(asked) if key not in seen), len(asked))
            seen.update(asked)
            for key in asked:
                if (row := last.pop(key, None)) is not None:
                    after[row] = request.at - times[row]
            continue
        at, length, leading = finished(request), len(request.keys), known.pop(number)
        for depth in range(length - 1, -1, -1):
            key = request.keys[depth]
            likeness = request.similarities[depth] if request.similarities else 0.0
            told = history.used(key, Use(at, None, depth, length, leading, request.answered, likeness), at)
            if forecasts is not None and request.conversation is not None:
                told = (*told[:-1], float(forecasts[number]))
            last[key] = len(features)
            features.append(told)
            times.append(at)
            after.append(np.inf)
            weights.append(length**-0.5 if trace.prefix else 1.0)
        seen.update(request.keys)
    end = max(times, default=0.0)
    rows = np.array(features, np.float64).reshape(-1, len(FEATURES))
    return Uses(rows, np.array(times), np.array(after), np.array(weights), end)
