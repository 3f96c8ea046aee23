"""Throughput under an open-loop load of prompts with re-used chunks (CacheBlend figure 14)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from blendrag.engine.client.engine import Engine
from blendrag.engine.recipe import Recipe
from blendrag.errors import ConfigError
from blendrag.lab.arms import recipe_of, reset
from blendrag.lab.bench.timed import Timed, ask_timed, exactly, stop
from blendrag.lab.experiment import Turn, in_turn
from blendrag.lab.prompts import Prompt, PromptMaker, check_prompts
from blendrag.lab.running import blending_engine
from blendrag.lab.scratch import ScratchStore, scratch_store
from blendrag.lab.setup import Setup
from blendrag.lab.statistics import Percentiles, percentiles
from blendrag.lab.texts import text_pieces
from blendrag.progress import Progress
from blendrag.settings import Settings
from blendrag.store.stack import TierSpec

WARM_UP = 1 / 6  # of a run's time, as the paper drops 1,000 of 6,000 requests
_LEAST, _STEP = 0.5, 1.25  # the lowest rate of an arm by its own without load, and from one to the next
_ALONE = 5  # requests, one after another
PROMPTS = 40  # different ones, asked again and again

Ways = dict[str, Callable[[Prompt], tuple[Recipe | None, str]]]  # per arm: a prompt's recipe and namespace


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What is measured.

    pool: chunks that prompts are made of. seconds: of arrivals, per arm and rate. tries: rates per arm, about
    what it answers without load.
    """

    chunks: int = 6
    chunk_tokens: int = 256
    pool: int = 48
    max_tokens: int = 16
    seconds: float = 24.0
    tries: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.pool < self.chunks:
            raise ConfigError(f"--pool {self.pool}: fewer than the {self.chunks} chunks of a prompt")


@dataclass(frozen=True, slots=True)
class Run:
    """One arm at one rate (requests a second), of the requests that were due after the warm-up.

    unfinished: cut off. not_blended: with a recipe that the engine prefilled, wholly or in part.
    reused_tokens: mean. ttft_ms: from when a request was due. itl_ms: between tokens of one answer; None if
    no answer came to two. arrived_per_s, completed_per_s: requests due, and requests (warm-up's, too) that
    ended. saturated: share of the time in which two or more requests waited for their first token.
    """

    rate: float
    requests: int
    unfinished: int
    not_blended: int
    reused_tokens: float
    ttft_ms: Percentiles[float]
    itl_ms: Percentiles[float] | None
    arrived_per_s: float
    completed_per_s: float
    saturated: float


@dataclass(frozen=True, slots=True)
class Alone:
    """Medians of requests one after another: until the first token, until the last."""

    ttft_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class LoadArm:
    """runs: by rate, ascending. per_s: the highest completed rate at which p95 of TTFT kept to the bound;
    vs_full, vs_prefix: what it is of others'. All None where no rate did. past: whether a rate did not, or
    the arm may be able to do more."""

    alone: Alone
    runs: list[Run]
    per_s: float | None
    past: bool
    vs_full: float | None
    vs_prefix: float | None


@dataclass(frozen=True, slots=True)
class LoadResults:
    """arms: full, prefix, blended. bound_ms: of p95 TTFT, twice full prefill's without load."""

    arms: dict[str, LoadArm]
    bound_ms: float
    setup: Setup[LoadOptions]

    def to_dict(self) -> dict[str, Any]:
        arms = {name: asdict(arm) for name, arm in self.arms.items()}
        return {"arms": arms, "bound_ms": self.bound_ms} | self.setup.to_dict()


def run_load(settings: Settings, options: LoadOptions, progress: Progress) -> LoadResults:
    """At one rate all arms are sent the same prompts at the same times, from an empty prefix cache.

    Raises ConfigError, ModelError, PromptTooLongError, StoreError, EngineError.
    """
    with blending_engine(settings, progress) as engine:
        maker = PromptMaker.of(engine, settings)
        progress.note("ingest")
        pieces = text_pieces(maker.tokenizer, options.pool, options.chunk_tokens)
        with scratch_store(engine, settings, pieces, TierSpec(kind="ram")) as store:
            trials = maker.trials(store.chunks, options.chunks, PROMPTS, options.seed)
            prompts = [trial.prompt for trial in trials]
            check_prompts(prompts, engine.max_model_len, options.max_tokens)
            runs = _Runs(engine, prompts, _ways(settings, store), options, progress)
            arms, bound_ms = asyncio.run(runs.measure())
        return LoadResults(arms, bound_ms, Setup.of(engine, settings, options, prompts))


def _ways(settings: Settings, store: ScratchStore) -> Ways:
    """Full prefill is a namespace of its own per request: nobody's KV is found there. The engine's prefix
    caching is left as it is for the two others; it finds blended KV again, too."""
    alone, recipe = itertools.count(), recipe_of(settings, store.id)
    return {
        "full": lambda prompt: (None, f"alone-{next(alone)}"),
        "prefix": lambda prompt: (None, ""),
        "blended": lambda prompt: (replace(recipe, spans=prompt.spans), ""),
    }


class _Runs:
    """The runs of one measurement."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        ways: Ways,
        options: LoadOptions,
        progress: Progress,
    ) -> None:
        self._engine, self._prompts, self._ways = engine, prompts, ways
        self._options, self._progress = options, progress
        self._sampling = exactly(options.max_tokens)
        self._bound_ms = 0.0

    async def measure(self) -> tuple[dict[str, LoadArm], float]:
        """The arms, and the bound."""
        tries = self._options.tries
        alone = {turn.key: await self._alone(turn.key) for turn in self._turns(1)}
        self._bound_ms = 2 * alone["full"].ttft_ms
        runs: dict[str, list[Run]] = {arm: [] for arm in self._ways}
        for turn in self._turns(tries):
            rate = _LEAST * _STEP**turn.trial * 1e3 / alone[turn.key].total_ms
            runs[turn.key].append(await self._run(turn.key, rate))
        return compare_arms(alone, runs, self._bound_ms), self._bound_ms

    def _turns(self, trials: int) -> Iterator[Turn[str, Any, int]]:
        return in_turn(self._ways, range(trials), self._progress, warm_up=0)

    async def _alone(self, arm: str) -> Alone:
        """The first request warms up."""
        reset(self._engine)
        timed = [Timed(0.0) for _ in range(_ALONE + 1)]
        for prompt, each in zip(itertools.cycle(self._prompts), timed, strict=False):
            await self._ask(arm, prompt, each)
        first, last = (
            float(np.median([1e3 * (each.tokens[at] - each.sent) for each in timed[1:]])) for at in (0, -1)
        )
        return Alone(first, last)

    async def _ask(self, arm: str, prompt: Prompt, timed: Timed) -> None:
        recipe, namespace = self._ways[arm](prompt)
        await ask_timed(self._engine, prompt.token_ids, self._sampling, timed, recipe, namespace)

    async def _run(self, arm: str, rate: float) -> Run:
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
        return summarise_run(rate, requests, start + WARM_UP * options.seconds, end, time.perf_counter())


# -- numbers ----------------------------------------------------------------------------------------------


def arrival_times(rate: float, seconds: float, seed: int) -> list[float]:
    """Poisson arrivals: seconds from the start, ascending, below ``seconds``.

    The same gaps for every rate, scaled, so that rates differ in nothing else.
    """
    rng, times, now = np.random.default_rng(seed), [], 0.0
    while (now := now + float(rng.exponential()) / rate) < seconds:
        times.append(now)
    return times


def summarise_run(rate: float, requests: Sequence[Timed], begin: float, end: float, cut_off: float) -> Run:
    """Of the requests due from ``begin`` to ``end``; what was due before is warm-up.

    One without a first token counts with what it had waited by ``cut_off``, or the slowest would be left out.
    Raises ConfigError if none was due.
    """
    own = [request for request in requests if begin <= request.due < end]
    if not own:
        raise ConfigError("no request arrived after the warm-up: ask for more --seconds")
    first = [(request.tokens[0] if request.tokens else cut_off) - request.due for request in own]
    gaps = [after - before for request in own for before, after in request.gaps]
    waits = [(request.due, request.tokens[0] if request.tokens else cut_off) for request in requests]
    ended = sum(request.done is not None and begin <= request.done < end for request in requests)
    return Run(
        rate=rate,
        requests=len(own),
        unfinished=sum(request.done is None for request in own),
        not_blended=sum(bool(request.report and request.report.problem) for request in own),
        reused_tokens=float(np.mean([request.reused for request in own])),
        ttft_ms=percentiles([1e3 * wait for wait in first]),
        itl_ms=percentiles([1e3 * gap for gap in gaps]) if gaps else None,
        arrived_per_s=len(own) / (end - begin),
        completed_per_s=ended / (end - begin),
        saturated=overlap_share(waits, begin, end),
    )


def overlap_share(waits: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """The share of [begin, end] in which two or more of the intervals run."""
    clipped = [(max(start, begin), min(stop, end)) for start, stop in waits]
    edges = sorted(edge for start, stop in clipped if start < stop for edge in ((start, 1), (stop, -1)))
    waiting, since, total = 0, begin, 0.0
    for at, change in edges:
        total += at - since if waiting >= 2 else 0.0
        waiting, since = waiting + change, at
    return total / (end - begin)


def compare_arms(
    alone: Mapping[str, Alone], runs: Mapping[str, list[Run]], bound_ms: float
) -> dict[str, LoadArm]:
    """What each arm sustains, and what that is of others'."""
    kept = {arm: [run for run in own if run.ttft_ms.p95 <= bound_ms] for arm, own in runs.items()}
    best = {arm: max((run.completed_per_s for run in own), default=0.0) for arm, own in kept.items()}

    def against(arm: str, other: str) -> float | None:
        return best[arm] / best[other] if best[arm] and best[other] else None

    return {
        arm: LoadArm(
            alone=alone[arm],
            runs=own,
            per_s=best[arm] or None,
            past=len(kept[arm]) < len(own),
            vs_full=against(arm, "full"),
            vs_prefix=against(arm, "prefix"),
        )
        for arm, own in runs.items()
    }
