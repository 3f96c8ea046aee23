"""From the times of requests under load to the numbers that are shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from blendrag.errors import ConfigError
from blendrag.lab.bench.timed import Timed


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95 and the largest."""
    middle, high = np.percentile(values, (50, 95))
    return {"p50": float(middle), "p95": float(high), "max": float(max(values))}


def summarise_run(requests: Sequence[Timed], begin: float, end: float, cut_off: float) -> dict[str, Any]:
    """One arm at one rate, of the requests due from ``begin`` to ``end``; what was due before is warm-up.

    ttft_ms: from when a request was due; one without a first token counts with what it had waited by
        ``cut_off``, or the slowest would be left out.
    not_blended: requests with a recipe that the engine prefilled, wholly or in part.
    arrived_per_s, completed_per_s: requests due, and requests (warm-up's, too) that ended, between both.
    saturated: share of that time in which two or more requests waited for their first token.
    itl_ms: between tokens of one answer. None if no answer came to two tokens.

    Raises ConfigError if none was due.
    """
    own = [request for request in requests if begin <= request.due < end]
    if not own:
        raise ConfigError("no request arrived after the warm-up: ask for more --seconds, or higher --rates")
    first = [(request.tokens[0] if request.tokens else cut_off) - request.due for request in own]
    gaps = [after - before for request in own for before, after in request.gaps]
    waits = [(request.due, request.tokens[0] if request.tokens else cut_off) for request in requests]
    ended = sum(request.done is not None and begin <= request.done < end for request in requests)
    return {
        "requests": len(own),
        "unfinished": sum(request.done is None for request in own),
        "not_blended": sum(bool(request.report and request.report.problem) for request in own),
        "reused_tokens": float(np.mean([request.reused for request in own])),
        "ttft_ms": percentiles([1e3 * wait for wait in first]),
        "itl_ms": percentiles([1e3 * gap for gap in gaps]) if gaps else None,
        "arrived_per_s": len(own) / (end - begin),
        "completed_per_s": ended / (end - begin),
        "saturated": overlap_share(waits, begin, end),
    }


def overlap_share(waits: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """The share of [begin, end] in which two or more of the intervals run."""
    clipped = [(max(start, begin), min(stop, end)) for start, stop in waits]
    edges = sorted(edge for start, stop in clipped if start < stop for edge in ((start, 1), (stop, -1)))
    waiting, since, total = 0, begin, 0.0
    for at, change in edges:
        total += at - since if waiting >= 2 else 0.0
        waiting, since = waiting + change, at
    return total / (end - begin)


def sustained(runs: Mapping[str, Sequence[Mapping[str, Any]]], bound_ms: float) -> dict[str, dict[str, Any]]:
    """Per arm the highest completed rate at which p95 of TTFT keeps to the bound, and what it is of others'.

    ``per_s`` is None, and so are the ratios, where no rate kept to it. past: whether a rate did not, or the
    arm may be able to do more.
    """
    kept = {
        arm: [run["completed_per_s"] for run in own if run["ttft_ms"]["p95"] <= bound_ms]
        for arm, own in runs.items()
    }
    best = {arm: max(rates, default=0.0) for arm, rates in kept.items()}
    return {
        arm: {
            "per_s": best[arm] or None,
            "past": len(kept[arm]) < len(runs[arm]),
            **{
                f"vs_{other}": best[arm] / best[other] if best[arm] and best[other] else None
                for other in ("full", "prefix")
            },
        }
        for arm in runs
    }
