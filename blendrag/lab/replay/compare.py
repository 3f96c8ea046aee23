"""Policies against each other and against the optimum: all sizes, all seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from blendrag.errors import ConfigError
from blendrag.eviction import POLICIES, EvictionPolicy, make_policy
from blendrag.eviction.hazard import Hazard
from blendrag.eviction.lpc_plus import LPCPlus
from blendrag.lab.progress import BenchProgress
from blendrag.lab.replay.against import BOUNDS, OPTIMAL, ORACLE, STATIC
from blendrag.lab.replay.belady import optimum
from blendrag.lab.replay.costs import Costs
from blendrag.lab.replay.learned import learned
from blendrag.lab.replay.oracle import oracle_forecasts
from blendrag.lab.replay.request import Trace
from blendrag.lab.replay.run import Outcome, replay
from blendrag.lab.replay.source import Source
from blendrag.lab.replay.static import static
from blendrag.lab.replay.summary import Run, summary

LEARNED = "lpc+"


@dataclass(frozen=True, slots=True)
class EvictionOptions:
    """sizes: capacities, ascending, in the trace's unit. policies: names. seeds: traces that are made, where
    they are made. warmup: share of the requests that fills the caches and is not counted; ``lpc+`` learns
    from it, and without it from nothing."""

    sizes: tuple[int, ...]
    policies: tuple[str, ...]
    seeds: int = 5
    warmup: float = 0.0

    @classmethod
    def parse(cls, sizes: str, policies: str | None, seeds: int, warmup: float) -> EvictionOptions:
        """From what stands between commas. Without policies: all. Raises ConfigError, naming it."""
        try:
            numbers = sorted({int(word.replace("_", "")) for word in sizes.split(",")})
        except ValueError:
            raise ConfigError(f"--sizes {sizes}: not whole numbers with commas between them") from None
        if numbers[0] < 1:
            raise ConfigError(f"--sizes {sizes}: a cache must hold 1 or more")
        names = [word.strip() for word in policies.split(",")] if policies else sorted(POLICIES)
        for name in names:
            if name not in (*POLICIES, *BOUNDS):
                raise ConfigError(f"--policies: unknown {name!r}; there are {', '.join(sorted(POLICIES))}")
        chosen = [name for name in dict.fromkeys(names) if name not in BOUNDS]
        return cls(tuple(numbers), tuple(chosen), seeds, warmup)


def run_eviction(
    source: Source,
    options: EvictionOptions,
    costs: Costs,
    progress: BenchProgress,
    make: Callable[[str], EvictionPolicy] = make_policy,
) -> dict[str, Any]:
    """Replay everything; JSON-able results as :func:`summary` gives them.

    Beside the policies there are always the optimum; where the trace says which conversations go on, the
    oracle, which is LPC with those for its forecasts; and where requests are drawn from one popularity, the
    most that can be found without knowing the future (:mod:`.static`).
    """
    traces = [source.trace(seed) for seed in range(options.seeds if source.generated else 1)]
    for trace in traces:
        if not trace.requests:
            raise ConfigError("the trace holds no requests: make it longer")
    told = [oracle_forecasts(trace) for trace in traces]
    drawn = all(trace.popularity for trace in traces)
    names = [*options.policies, *([ORACLE] if all(told) else []), *([STATIC] if drawn else []), OPTIMAL]
    progress.total(len(traces) * len(names) * len(options.sizes))
    runs: dict[str, list[list[Run]]] = {name: [[] for _ in options.sizes] for name in names}
    for trace, known in zip(traces, told, strict=True):
        progress.note("forecasts")
        forecasts: Mapping[str, Sequence[float] | None] = {ORACLE: known}
        predicted = source.forecasts(trace)
        progress.note(f"{LEARNED} learns")
        taught = learned(trace, options.warmup, predicted) if LEARNED in names else None
        maker = partial(_maker, taught, make)
        for name in names:
            for place, size in enumerate(options.sizes):
                progress.note(f"{name}, {size:,} {trace.unit}")
                outcome = _one(trace, name, size, forecasts.get(name, predicted), costs, maker)
                runs[name][place].append(Run.of(outcome, options.warmup))
                progress.step()
    return summary(traces[0], options.sizes, runs, costs) | {"notes": list(source.notes)}


def _maker(taught: Hazard | None, make: Callable[[str], EvictionPolicy], name: str) -> EvictionPolicy:
    return LPCPlus(taught) if taught and name == LEARNED else make(name)


def _one(
    trace: Trace,
    name: str,
    size: int,
    forecasts: Sequence[float] | None,
    costs: Costs,
    make: Callable[[str], EvictionPolicy],
) -> Outcome:
    if name == OPTIMAL:
        return optimum(trace, size, costs)
    if name == STATIC:
        return static(trace, size, costs)
    return replay(trace, make("lpc" if name == ORACLE else name), size, forecasts=forecasts, costs=costs)
