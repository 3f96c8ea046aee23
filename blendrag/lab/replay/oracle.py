"""The forecasts of one who knows: how far a better predictor could bring LPC."""

from __future__ import annotations

from blendrag.lab.replay.request import Trace


def oracle_forecasts(trace: Trace) -> list[float] | None:
    """By request, 1 if its conversation goes on, else 0; None where the trace does not say so of each.

    With these :class:`~blendrag.eviction.lpc.LPC` is the paper's Oracle (section 4.2): what is over leaves
    first, and the rest by LRU. It does not know when conversations go on; Belady's optimum does.
    """
    if not trace.requests or any(request.continues is None for request in trace.requests):
        return None
    return [float(bool(request.continues)) for request in trace.requests]
