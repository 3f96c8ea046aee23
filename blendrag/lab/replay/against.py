"""Hit ratios against LRU's and against the bounds: the numbers that a policy is chosen by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LRU, ORACLE, STATIC, OPTIMAL = "lru", "oracle", "static", "optimal"
BOUNDS = (ORACLE, STATIC, OPTIMAL)  # no policies: they know what nobody does

_SLUMP = 0.97  # of LRU's hit ratio
_LEAST_GAP = 0.005  # of hit ratio: shares of less say nothing

Hits = Mapping[str, Sequence[float]]  # by policy: a hit ratio for each size


def against(sizes: Sequence[int], hits: Hits, traces: Sequence[Hits]) -> dict[str, Any]:
    """JSON-able; for each policy a value per size. hits: means; traces: the same of each trace.

    saved: as :func:`saved`, by the means. saved_spread: [lowest, highest] among the traces; None unless
    every one of them tells. closed: share of the way from LRU to the optimum; None where there is hardly any.
    behind: by bound (oracle, static, optimum), by policy, the hit ratio that is missing. Without LRU, that
    alone.
    """
    bounds = [bound for bound in BOUNDS if bound in hits]
    answer: dict[str, Any] = {
        "behind": {
            bound: {name: _less(hits[bound], of) for name, of in hits.items() if name != bound}
            for bound in bounds
        }
    }
    if LRU not in hits:
        return answer
    others = [name for name in hits if name != LRU]
    each = {name: [saved(sizes, trace[LRU], trace[name]) for trace in traces] for name in others}
    return answer | {
        "saved": {name: saved(sizes, hits[LRU], hits[name]) for name in others},
        "saved_spread": {
            name: [_spread(column) for column in zip(*of, strict=True)] for name, of in each.items()
        },
        "closed": {
            name: [
                _share(hit - lru, best - lru)
                for lru, hit, best in zip(hits[LRU], hits[name], hits[OPTIMAL], strict=True)
            ]
            for name in others
        },
    }


def slump(windows: Sequence[float | None], lru: Sequence[float | None]) -> int:
    """Most windows in a row in which a policy found over 3 % less than LRU."""
    most = row = 0
    for own, other in zip(windows, lru, strict=True):
        if own is not None and other is not None:
            row = row + 1 if own < _SLUMP * other else 0
            most = max(most, row)
    return most


def saved(sizes: Sequence[int], lru: Sequence[float], hits: Sequence[float]) -> list[float | None]:
    """For each size, the share of it that a policy can do without and find as much as LRU does there.

    None where the policy never found so little, or so much, at the sizes that were replayed. Where LRU finds
    no more than it did at a smaller size, it is that size which is compared: room that LRU does not need
    either is not saved.
    """
    needs = [(needed(sizes, lru, wanted), needed(sizes, hits, wanted)) for wanted in lru]
    return [None if low is None or own is None else 1.0 - low / own for own, low in needs]


def needed(sizes: Sequence[int], hits: Sequence[float], wanted: float) -> float | None:
    """The least size that finds ``wanted``, on straight lines between the sizes that were replayed; None
    beyond their ends. sizes: ascending. A larger cache is taken to find no less than a smaller one."""
    rising = np.maximum.accumulate(hits)
    if not rising[0] <= wanted <= rising[-1]:
        return None
    above = int(np.searchsorted(rising, wanted))
    if above == 0:
        return float(sizes[0])
    low, high = rising[above - 1], rising[above]
    return float(sizes[above - 1] + (wanted - low) / (high - low) * (sizes[above] - sizes[above - 1]))


def _less(bound: Sequence[float], hits: Sequence[float]) -> list[float]:
    return [best - hit for best, hit in zip(bound, hits, strict=True)]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > _LEAST_GAP else None


def _spread(values: Sequence[float | None]) -> list[float] | None:
    told = [value for value in values if value is not None]
    return [min(told), max(told)] if len(told) == len(values) else None
