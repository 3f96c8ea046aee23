"""Requests that arrive whether or not those before are answered, and what became of them."""

from __future__ import annotations

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Generic, TypeVar

import numpy as np
from rich.table import Table

from blendrag.engine.client.engine import Engine
from blendrag.errors import ConfigError
from blendrag.lab import canvas
from blendrag.lab.arms import Asked
from blendrag.lab.bench.timed import Timed, ask_timed, cancel, exactly
from blendrag.lab.canvas import ARM_COLOURS, ARM_LABELS, INK
from blendrag.lab.experiment import in_turn
from blendrag.lab.results import EngineResults, Options
from blendrag.lab.statistics import Percentiles, percentiles
from blendrag.progress import Progress
from blendrag.tables import table_with

P = TypeVar("P")

WARM_UP = 1 / 6  # of a run's time, as CacheBlend drops 1,000 of 6,000 requests


@dataclass(frozen=True, slots=True)
class Run:
    """One arm at one rate (requests a second), of the requests that were due after the warm-up.

    not_blended: with a recipe that the engine prefilled, wholly or in part.
    reused_tokens, exact_tokens: means of what the engine did not compute itself, and what came from a tree,
        of requests with a first token.
    ttft_ms: from when a request was due; each_ms: of each, in the order of arrival.
    completed_per_s: requests (warm-up's, too) that ended.
    """

    rate: float
    requests: int
    not_blended: int
    reused_tokens: float
    exact_tokens: float
    ttft_ms: Percentiles
    each_ms: list[float]
    completed_per_s: float


@dataclass(frozen=True, slots=True)
class Alone:
    """An arm without load, as medians of requests one after another: until the first token, until the last.
    each_ms: until the first."""

    ttft_ms: float
    total_ms: float
    each_ms: list[float]

    @classmethod
    def of(cls, requests: Sequence[Timed]) -> Alone:
        first, last = ([1e3 * (each.tokens[at] - each.sent) for each in requests] for at in (0, -1))
        return cls(float(np.median(first)), float(np.median(last)), first)


@dataclass(frozen=True, slots=True)
class LoadArm:
    """Results of an arm. runs: by rate, ascending. per_s: the highest completed rate at which p95 of TTFT
    kept to the bound; vs_full, vs_prefix: what it is of others'. All None where no rate did. past: whether a
    rate did not, or the arm may be able to do more."""

    alone: Alone
    runs: list[Run]
    per_s: float | None
    past: bool
    vs_full: float | None
    vs_prefix: float | None


@dataclass
class OpenLoop(ABC, Generic[P]):
    """A measurement of arms: asked one by one, then by requests at given times, at rates that rise.

    max_tokens: of every answer.
    """

    engine: Engine
    progress: Progress
    max_tokens: int

    @abstractmethod
    def asked(self, arm: str, given: P) -> Asked:
        """Return how an arm sends a prompt."""

    @abstractmethod
    async def one_by_one(self, arm: str, block: int) -> list[Timed]:
        """Ask a block of prompts one after another, without load."""

    @abstractmethod
    async def at_rate(self, arm: str, number: int, alone: Mapping[str, Alone], bound_ms: float) -> Run:
        """Ask at the rate of this number, from 0."""

    async def measure(
        self, names: Sequence[str], blocks: int, rates: int, *, past: bool = True
    ) -> tuple[dict[str, LoadArm], float]:
        """Return the arms, and the bound: twice full prefill's TTFT without load, or the slowest arm's. past:
        whether an arm that did not keep to it is asked at higher rates."""
        asked: dict[str, list[Timed]] = {arm: [] for arm in names}
        for turn in in_turn(dict.fromkeys(names), range(blocks), self.progress, warm_up=0):
            asked[turn.key] += await self.one_by_one(turn.key, turn.trial)
        alone = {arm: Alone.of(own) for arm, own in asked.items()}
        bound_ms = 2 * slowest(alone).ttft_ms
        runs: dict[str, list[Run]] = {arm: [] for arm in names}
        for turn in in_turn(dict.fromkeys(names), range(rates), self.progress, warm_up=0):
            own = runs[turn.key]
            if past or not own or own[-1].ttft_ms.p95 <= bound_ms:
                own.append(await self.at_rate(turn.key, turn.trial, alone, bound_ms))
        return compare_arms(alone, runs, bound_ms), bound_ms

    async def ask(self, arm: str, given: P, timed: Timed | None = None) -> Timed:
        """Send a prompt now, and wait for the answer."""
        timed, asked = timed or Timed(time.perf_counter()), self.asked(arm, given)
        sampling = replace(exactly(self.max_tokens), path=asked.path)
        await ask_timed(self.engine, asked.token_ids, sampling, timed, asked.recipe, asked.namespace)
        return timed

    async def send(
        self,
        arm: str,
        rate: float,
        given: Iterable[P],
        times: Sequence[float],
        seconds: float,
        bound_ms: float,
    ) -> Run:
        """Send prompts at these times, seconds from now and below ``seconds``; answers that take longer than
        the bound after the last one could arrive are cut off."""
        start = time.perf_counter()
        requests = [Timed(start + at) for at in times]
        end = start + seconds
        tasks: list[asyncio.Task[Timed]] = []
        try:
            async with asyncio.timeout(seconds + bound_ms / 1e3):
                for one, timed in zip(itertools.cycle(given), requests, strict=False):
                    await asyncio.sleep(timed.due - time.perf_counter())
                    tasks.append(asyncio.create_task(self.ask(arm, one, timed)))
                await asyncio.gather(*tasks)
        except TimeoutError:
            pass
        finally:
            await cancel(tasks)
        return summarise_run(rate, requests, start + WARM_UP * seconds, end, time.perf_counter())


# -- numbers ----------------------------------------------------------------------------------------------


def slowest(alone: Mapping[str, Alone]) -> Alone:
    """Return full prefill's times without load, or where it was not asked the slowest arm's."""
    return alone.get("full") or max(alone.values(), key=lambda own: own.total_ms)


def arrival_times(
    rate: float, seconds: float, seed: int, recorded: Sequence[float] | None = None
) -> list[float]:
    """Return seconds from the start, ascending, below ``seconds``: Poisson arrivals, or those of ``recorded``
    (at least two, ascending) from a place on that ``seed`` chooses.

    The same gaps for every rate, scaled, so that rates differ in nothing else.
    """
    rng, times, now = np.random.default_rng(seed), [], 0.0
    if recorded is None:
        gaps = iter(rng.exponential, None)  # without an end
    else:
        steps = np.diff(recorded)
        gaps = itertools.cycle(np.roll(steps / steps.mean(), -int(rng.integers(len(steps)))).tolist())
    for gap in gaps:
        now += float(gap) / rate
        if now >= seconds:
            break
        times.append(now)
    return times


def summarise_run(rate: float, requests: Sequence[Timed], begin: float, end: float, cut_off: float) -> Run:
    """Summarise the requests due from ``begin`` to ``end``; what was due before is warm-up.

    One without a first token counts with what it had waited by ``cut_off``, or the slowest would be left out.
    Raises ConfigError if none was due.
    """
    own = [request for request in requests if begin <= request.due < end]
    if not own:
        raise ConfigError("no request arrived after the warm-up: ask for more --seconds")
    begun = [request for request in own if request.tokens]
    first = [1e3 * ((request.tokens[0] if request.tokens else cut_off) - request.due) for request in own]
    reused = [request.reused for request in begun]
    exact = [request.report.exact if request.report else 0 for request in begun]
    ended = sum(request.done is not None and begin <= request.done < end for request in requests)
    return Run(
        rate=rate,
        requests=len(own),
        not_blended=sum(bool(request.report and request.report.problem) for request in own),
        reused_tokens=fmean(reused or [0]),
        exact_tokens=fmean(exact or [0]),
        ttft_ms=percentiles(first),
        each_ms=first,
        completed_per_s=ended / (end - begin),
    )


def compare_arms(
    alone: Mapping[str, Alone], runs: Mapping[str, list[Run]], bound_ms: float
) -> dict[str, LoadArm]:
    """Return what each arm sustains, and what that is of others'."""
    kept = {arm: [run for run in own if run.ttft_ms.p95 <= bound_ms] for arm, own in runs.items()}
    best = {arm: max((run.completed_per_s for run in own), default=None) for arm, own in kept.items()}

    def against(arm: str, other: str) -> float | None:
        one, rival = best[arm], best.get(other)
        return one / rival if one and rival else None

    return {
        arm: LoadArm(
            alone=alone[arm],
            runs=own,
            per_s=best[arm],
            past=len(kept[arm]) < len(own),
            vs_full=against(arm, "full"),
            vs_prefix=against(arm, "prefix"),
        )
        for arm, own in runs.items()
    }


# -- tables and pictures ----------------------------------------------------------------------------------

_ROOM = 2.5  # of the bound: what is above is out of the picture, being a queue that only grows
_LOOKS = {arm: (colour, ARM_LABELS[arm]) for arm, colour in ARM_COLOURS.items()} | {
    "tree": ("#57a773", "exact prefixes"),
    "unmixed": ("#d99a8f", "blended, with whole ones"),
    "both": ("#c7452f", "blended, with those"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(EngineResults[Options]):
    """Results of arms under load. bound_ms: of p95 TTFT, twice full prefill's without load."""

    arms: dict[str, LoadArm]
    bound_ms: float

    def draw(self, path: Path) -> None:
        """Write the picture: p50 to the left, p95 and its bound to the right."""
        figure = canvas.new_figure(9, 3.8)
        panels = figure.subplots(1, 2, sharey=True)
        bound = self.bound_ms / 1e3
        for axes, key, title in zip(panels, ("p50", "p95"), ("Median", "95th percentile"), strict=True):
            for name, arm in self.arms.items():
                colour, label = _LOOKS[name]
                rates = [run.rate for run in arm.runs]
                waits = [getattr(run.ttft_ms, key) / 1e3 for run in arm.runs]
                axes.plot(rates, waits, color=colour, marker="o", markersize=4, label=label)
            axes.set_ylim(0, _ROOM * bound)
            axes.set_xlim(left=0)
            canvas.finish_axes(axes, title, "requests a second", "time to first token, s")
        panels[1].axhline(bound, color=INK, linewidth=0.8, linestyle="--")
        panels[1].set_ylabel("")
        canvas.add_legend(figure, panels[0])
        canvas.save(figure, path, self.setup.machine)


def load_tables(arms: Mapping[str, LoadArm], bound_ms: float) -> tuple[Table, Table]:
    """Return a table with a row per arm and rate; then one of what each arm can sustain."""
    runs = table_with("arm", "rate/s", "done/s", "TTFT p50", "p95 ms")
    best = table_with("arm", "alone ms", "sustained/s", "/ full", "/ prefix")
    for name, arm in arms.items():
        for run in arm.runs:
            late = "" if run.ttft_ms.p95 <= bound_ms else " >"
            waits = f"{run.ttft_ms.p50:,.0f}", f"{run.ttft_ms.p95:,.0f}{late}"
            runs.add_row(name, f"{run.rate:.2f}", f"{run.completed_per_s:.2f}", *waits)
        rate = f"{arm.per_s:.2f}" if arm.per_s else "none"
        ratios = (f"{ratio:.2f}x" if ratio else "-" for ratio in (arm.vs_full, arm.vs_prefix))
        best.add_row(name, f"{arm.alone.ttft_ms:,.0f}", rate if arm.past else f"{rate} at least", *ratios)
    return runs, best
