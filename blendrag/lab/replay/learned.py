"""``lpc+`` for a replay: what it knows, it learned from the requests that are not counted."""

from __future__ import annotations

from collections.abc import Sequence

from blendrag.eviction.hazard import Hazard
from blendrag.lab.replay.request import Trace
from blendrag.lab.training.hazard_rows import uses_of
from blendrag.lab.training.hazard_training import fit_hazard


def learned(trace: Trace, share: float, forecasts: Sequence[float] | None = None) -> Hazard | None:
    """The model of the first ``share`` of a trace's requests; None if they teach too little.

    Nothing is used that was not known when the first of the other requests came.
    """
    first = int(share * len(trace.requests))
    if not 0 < first < len(trace.requests):
        return None
    return fit_hazard(uses_of(trace, forecasts).before(trace.requests[first].at), trace.prefix)
