"""The runs of a load: every arm at every rate, the rates given or looked for."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from blendrag.engine.client.engine import Engine
from blendrag.engine.recipe import Recipe
from blendrag.errors import ConfigError
from blendrag.lab.arms import reset
from blendrag.lab.bench.arrivals import STEP, RateSearch, arrival_times, rung_below
from blendrag.lab.bench.load_summary import summarise_run, sustained
from blendrag.lab.bench.timed import Timed, ask_timed, exactly, stop
from blendrag.lab.progress import BenchProgress
from blendrag.lab.prompts import Prompt

WARM_UP = 1 / 6  # of a run's time, as the paper drops 1,000 of 6,000 requests
_BELOW = 0.5  # of an arm's own rate of requests one after another: where its search begins
_ALONE = 5  # requests, one after another

Tell = Callable[[bool], None]  # whether a rate was sustained
Ways = dict[str, Callable[[Prompt], tuple[Recipe | None, str]]]  # per arm: a prompt's recipe and namespace


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What is measured.

    seconds: of arrivals, per arm and rate. rates: requests per second, for every arm; none: they are looked
    for, with ``tries`` per arm. bound_ms: of p95 TTFT; None: twice full prefill's unloaded median. order:
    ``retrieved`` (nearest chunk first) or ``shuffled``.
    """

    chunks: int = 6
    chunk_tokens: int = 256
    pool: int = 48
    questions: int = 40
    max_tokens: int = 16
    seconds: float = 24.0
    rates: tuple[float, ...] = ()
    tries: int = 5
    bound_ms: float | None = None
    order: str = "retrieved"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.pool < self.chunks:
            raise ConfigError(f"--pool {self.pool}: fewer than the {self.chunks} chunks of a prompt")
        if self.order not in ("retrieved", "shuffled"):
            raise ConfigError(f"--order {self.order}: it is retrieved or shuffled")
        if self.seconds <= 0 or self.tries < 1 or (self.bound_ms is not None and self.bound_ms <= 0):
            raise ConfigError("--seconds, --tries and --bound-ms must be above 0")


class LoadRuns:
    """The runs of one measurement."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        ways: Ways,
        options: LoadOptions,
        progress: BenchProgress,
    ) -> None:
        self._engine, self._prompts, self._ways = engine, prompts, ways
        self._options, self._progress = options, progress
        self._sampling = exactly(options.max_tokens)
        self._bound_ms = options.bound_ms or 0.0

    async def measure(self) -> dict[str, Any]:
        """What ``run_load`` says, but for the machine and the options."""
        alone = await self._alone()
        self._bound_ms = self._bound_ms or 2 * alone["full"]["ttft_ms"]
        runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in self._ways}
        for arm, rate, tell in self._plan(alone):
            self._progress.note(f"{arm} at {rate:.2f} requests a second")
            run = {"rate": rate} | await self._run(arm, rate)
            tell(run["ttft_ms"]["p95"] <= self._bound_ms)
            runs[arm].append(run)
            self._progress.step()
        best = sustained(runs, self._bound_ms)
        return {
            "arms": {
                arm: best[arm] | {"alone": alone[arm], "runs": sorted(own, key=lambda run: run["rate"])}
                for arm, own in runs.items()
            },
            "bound_ms": self._bound_ms,
        }

    def _plan(self, alone: dict[str, dict[str, float]]) -> Iterator[tuple[str, float, Tell]]:
        """Arm, rate, and whom to tell whether it was sustained: the arms in turns."""
        options = self._options
        if options.rates:
            self._progress.total(len(self._ways) * len(options.rates))
            for rate in options.rates:
                yield from ((arm, rate, lambda sustained: None) for arm in self._ways)
            return
        self._progress.total(len(self._ways) * options.tries)
        base = 1e3 / alone["full"]["total_ms"]
        searches = {
            arm: RateSearch(rung_below(_BELOW * 1e3 / alone[arm]["total_ms"], base), options.tries)
            for arm in self._ways
        }
        for _ in range(options.tries):
            for arm, search in searches.items():
                rung = search.next()
                if rung is None:
                    self._progress.step()  # it is found
                    continue
                yield arm, base * STEP**rung, partial(search.tell, rung)

    async def _alone(self) -> dict[str, dict[str, float]]:
        """Per arm the medians of requests one after another; the first warms up."""
        found = {}
        for arm in self._ways:
            self._progress.note(f"{arm}, requests one after another")
            reset(self._engine)
            timed = [Timed(0.0) for _ in range(_ALONE + 1)]
            for prompt, each in zip(itertools.cycle(self._prompts), timed, strict=False):
                await self._ask(arm, prompt, each)
            found[arm] = {
                "ttft_ms": float(np.median([1e3 * (each.tokens[0] - each.sent) for each in timed[1:]])),
                "total_ms": float(np.median([1e3 * (each.tokens[-1] - each.sent) for each in timed[1:]])),
            }
        return found

    async def _ask(self, arm: str, prompt: Prompt, timed: Timed) -> None:
        recipe, namespace = self._ways[arm](prompt)
        await ask_timed(self._engine, prompt.token_ids, self._sampling, timed, recipe, namespace)

    async def _run(self, arm: str, rate: float) -> dict[str, Any]:
        """Send at the times of this rate; answers that take longer than the bound after the last one could
        arrive are cut off."""
        options = self._options
        reset(self._engine)
        start = time.perf_counter()
        requests = [Timed(start + at) for at in arrival_times(rate, options.seconds, options.seed)]
        end = start + options.seconds
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(options.seconds + self._bound_ms / 1e3):
                for prompt, timed in zip(itertools.cycle(self._prompts), requests, strict=False):
                    await asyncio.sleep(timed.due - time.perf_counter())
                    tasks.append(asyncio.create_task(self._ask(arm, prompt, timed)))
                await asyncio.gather(*tasks)
        except TimeoutError:
            pass
        finally:
            await stop(self._engine, tasks)
        return summarise_run(requests, start + WARM_UP * options.seconds, end, time.perf_counter())
