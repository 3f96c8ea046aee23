"""Policies against each other and against the optimum: all sizes, all seeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.table import Table

from blendrag.errors import ConfigError
from blendrag.eviction import make_policy
from blendrag.eviction.lpc_plus import LPCPlus
from blendrag.lab.eviction.fit_hazard import learned
from blendrag.lab.eviction.replay import optimum, replay
from blendrag.lab.eviction.source import TraceSource
from blendrag.lab.options import EvictionOptions
from blendrag.lab.results import Results
from blendrag.progress import Progress
from blendrag.tables import table_with

LRU, LEARNED, OPTIMAL = "lru", "lpc+", "optimal"  # the last one is no policy

_MIN_GAP = 0.005  # smallest difference of hit ratio of which shares say something


@dataclass(frozen=True, slots=True)
class EvictionResults(Results):
    """Results by policy, for each size. policies: token hit ratios, means over traces. closed: share of the
    way from LRU to the optimum; None where there is hardly any, empty without LRU.

    config: the trace's name and the unit of sizes; requests in a trace, and how many traces. notes: what a
    reader should know.
    """

    sizes: tuple[int, ...]
    policies: dict[str, list[float]]
    closed: dict[str, list[float | None]]
    config: dict[str, Any]
    notes: tuple[str, ...]

    def parts(self) -> Iterator[Table | str]:
        """Yield hit ratios by size, and what they close of the gap between LRU and the optimum; a dash where
        the replays do not tell."""
        for title, values, form in (
            ("token hit ratio", self.policies, ".4f"),
            ("closed, of LRU's gap to the optimum", self.closed, ".0%"),
        ):
            if values:
                table = table_with("size", *values, title=title)
                for size, *row in zip(self.sizes, *values.values(), strict=True):
                    table.add_row(f"{size:,}", *("–" if one is None else format(one, form) for one in row))
                yield table
        config = self.config
        times = "one trace" if config["traces"] == 1 else f"means of {config['traces']} traces"
        yield f"{config['trace']}: {config['requests']:,} requests, sizes in {config['unit']}; {times}."
        yield from self.notes


def run_eviction(source: TraceSource, options: EvictionOptions, progress: Progress) -> EvictionResults:
    """Replay everything, and the optimum beside it."""
    traces = [source.trace(seed) for seed in range(options.seeds if source.generated else 1)]
    if not all(trace.requests for trace in traces):
        raise ConfigError("the trace holds no requests: make it longer")
    names, sizes = [*options.names, OPTIMAL], options.capacities
    progress.total(len(traces) * len(names) * len(sizes))
    ratios: dict[str, list[list[float]]] = {name: [[] for _ in sizes] for name in names}
    for trace in traces:
        first = min(int(options.warmup * len(trace.requests)), len(trace.requests) - 1)
        progress.note("forecasts")
        predicted = source.forecasts(trace)
        progress.note(f"{LEARNED} learns")
        taught = learned(trace, options.warmup, predicted) if LEARNED in names else None
        for name in names:
            for size, found in zip(sizes, ratios[name], strict=True):
                progress.note(f"{name}, {size:,} {trace.unit}")
                if name == OPTIMAL:
                    outcome = optimum(trace, size)
                else:
                    policy = LPCPlus(taught) if name == LEARNED else make_policy(name)
                    outcome = replay(trace, policy, size, forecasts=predicted)
                found.append(outcome.hit_ratio(first))
                progress.advance()
    hits = {name: [fmean(same) for same in of] for name, of in ratios.items()}
    others = [name for name in names if name != LRU] if LRU in hits else []
    return EvictionResults(
        sizes=sizes,
        policies=hits,
        closed={
            name: [
                (hit - low) / (best - low) if best - low > _MIN_GAP else None
                for low, hit, best in zip(hits[LRU], hits[name], hits[OPTIMAL], strict=True)
            ]
            for name in others
        },
        config={
            "trace": traces[0].name,
            "unit": traces[0].unit,
            "requests": len(traces[0].requests),
            "traces": len(traces),
        },
        notes=source.notes,
    )
