"""From what each request found to the numbers that are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from blendrag.lab.replay.against import LRU, against, slump
from blendrag.lab.replay.costs import Costs
from blendrag.lab.replay.request import Trace
from blendrag.lab.replay.run import Outcome

WINDOWS = 10  # of equal time


@dataclass(frozen=True, slots=True)
class Run:
    """One policy, one size, one trace. hit: tokens found per token asked. windows: the same, over time; None
    where nothing was asked. read, written: tokens. ttft_s: mean."""

    hit: float
    windows: tuple[float | None, ...]
    read: int
    written: int
    ttft_s: float

    @classmethod
    def of(cls, outcome: Outcome, warmup: float) -> Run:
        """Of what comes after the first ``warmup`` share of the requests, and of one at least."""
        first = min(int(warmup * len(outcome.at)), len(outcome.at) - 1)
        at, asked, found = outcome.at[first:], outcome.asked[first:], outcome.found[first:]
        edges = np.linspace(at[0], at[-1], WINDOWS + 1)[1:-1]
        place = np.searchsorted(edges, at, side="right")
        asked_in = np.bincount(place, asked, WINDOWS)
        found_in = np.bincount(place, found, WINDOWS)
        return cls(
            hit=float(found.sum() / max(1, asked.sum())),
            windows=tuple(float(f / a) if a else None for f, a in zip(found_in, asked_in, strict=True)),
            read=int(found.sum()),
            written=int(outcome.written[first:].sum()),
            ttft_s=float(outcome.ttft_s[first:].mean()),
        )


def summary(
    trace: Trace, sizes: Sequence[int], runs: Mapping[str, Sequence[Sequence[Run]]], costs: Costs
) -> dict[str, Any]:
    """JSON-able. runs: [policy][size][trace]. Means over traces, and between which values they lie.

    policies: token hit ratios. spread: (lowest, highest). windows: [size][window]. slump: most windows in a
    row in which a policy found over 3 % less than LRU, in the worst of the traces; empty without LRU.
    read_gb, written_gb: KV that moves, GB. ttft_ms: estimated. The rest is as
    :func:`~blendrag.lab.replay.against.against` gives it.
    """
    hits = {name: [fmean(run.hit for run in same) for same in of] for name, of in runs.items()}
    gb = costs.bytes_per_token / 1e9

    def mean(value: str, scale: float) -> dict[str, list[float]]:
        return {
            name: [scale * fmean(getattr(run, value) for run in same) for same in of]
            for name, of in runs.items()
        }

    results: dict[str, Any] = {
        "sizes": list(sizes),
        "policies": hits,
        "spread": {
            name: [[min(run.hit for run in same), max(run.hit for run in same)] for same in of]
            for name, of in runs.items()
        },
        "windows": {name: [_windows(same) for same in of] for name, of in runs.items()},
        "read_gb": mean("read", gb),
        "written_gb": mean("written", gb),
        "ttft_ms": mean("ttft_s", 1e3),
        "slump": {
            name: [
                max(slump(run.windows, lru.windows) for run, lru in zip(same, other, strict=True))
                for same, other in zip(of, runs[LRU], strict=True)
            ]
            for name, of in runs.items()
            if name != LRU and LRU in runs
        },
        "config": {
            "trace": trace.name,
            "unit": trace.unit,
            "requests": len(trace.requests),
            "traces": len(next(iter(runs.values()))[0]),
        },
    }
    each = [
        {name: [same[trace].hit for same in of] for name, of in runs.items()}
        for trace in range(results["config"]["traces"])
    ]
    return results | against(sizes, hits, each)


def _windows(runs: Sequence[Run]) -> list[float | None]:
    """Means over traces, window by window."""
    columns = zip(*(run.windows for run in runs), strict=True)
    present = [[value for value in column if value is not None] for column in columns]
    return [fmean(values) if values else None for values in present]
