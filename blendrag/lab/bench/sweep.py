"""Time to first token against one parameter at a time (CacheBlend figures 12, 15, 16 and 17)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from blendrag.engine.client.engine import Engine
from blendrag.errors import ConfigError
from blendrag.lab.arms import Arm, Blending, FullPrefill, PrefixCaching, Sample, recipe_of
from blendrag.lab.bench.sweep_points import Point, Value, axis_named
from blendrag.lab.bench.tiers import LOCAL, FromTier, servers_of
from blendrag.lab.bench.ttft import check_length
from blendrag.lab.progress import BenchProgress
from blendrag.lab.prompts import QUESTIONS, PromptMaker, Trial
from blendrag.lab.running import blending_engine
from blendrag.lab.statistics import spread, summarise
from blendrag.lab.texts import questions_of, text_pieces
from blendrag.lab.trial_store import TrialStore, trial_store
from blendrag.machine import describe_machine
from blendrag.select import make_selector
from blendrag.settings import Settings

ARMS = ("full", "prefix", "reuse", "blended")
_POOL = 2  # chunks in a store, per chunk of the largest prompt, or prompt of the largest batch


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """What is measured. chunks, chunk_tokens: of every prompt, unless they are what is varied."""

    axis: str
    values: tuple[Value, ...]
    chunks: int = 6
    chunk_tokens: int = 512
    repeats: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.chunks < 2 or self.chunk_tokens < 8 or self.repeats < 1 or not self.values:
            raise ConfigError("a sweep needs 2 chunks of 8 tokens, one repeat and one value at least")


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """An arm and its prompts: per repeat those that are asked at once. Points may share it, as full prefill
    does not depend on the ratio: it is then measured once."""

    arm: Arm
    rounds: Sequence[Sequence[Trial]]


Samples = Mapping[Job, Sequence[Sequence[Sample]]]


def run_sweep(settings: Settings, options: SweepOptions, progress: BenchProgress) -> dict[str, Any]:
    """Measure; the results, JSON-able:

    points: per value of the axis ``value`` and ``arms``: per arm (full, prefix, reuse, blended) what
        ``summarise_point`` says.
    machine, config: as ``run_ttft``.

    Raises ConfigError, ModelError, PromptTooLongError, StoreError, EngineError.
    """
    make_selector(settings.blending)  # what is wrong is told before the long start
    with blending_engine(settings, progress) as engine, ExitStack() as opened:
        return _measure(engine, settings, options, progress, opened)


def _measure(
    engine: Engine, settings: Settings, options: SweepOptions, progress: BenchProgress, opened: ExitStack
) -> dict[str, Any]:
    axis = axis_named(options.axis)
    start = Point(options.chunks, options.chunk_tokens, settings.recompute_ratio, settings.codec)
    points = {value: axis.at(start, value) for value in options.values}
    cases = _cases(engine, settings, options, points, progress, opened)
    samples = measure_in_turns(engine, cases, progress)
    return {
        "axis": axis.name,
        "label": axis.label,
        "points": [
            {"value": value, "arms": summarise_point({name: samples[job] for name, job in case.items()})}
            for value, case in cases.items()
        ],
        "machine": describe_machine(settings.model, engine.facts),
        "config": asdict(options) | {
            "ratio": settings.recompute_ratio, "codec": settings.codec, "selector": settings.selector,
            "metric": settings.metric, "check_layers": list(settings.check_layers),
        },
    }  # fmt: skip


def _cases(
    engine: Engine,
    settings: Settings,
    options: SweepOptions,
    points: Mapping[Value, Point],
    progress: BenchProgress,
    opened: ExitStack,
) -> dict[Value, dict[str, Job]]:
    """Per value its four jobs, over stores that are filled."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(engine.model_path))
    maker = PromptMaker(tokenizer, system_prompt=settings.system_prompt, separator=settings.separator)
    pool = max(_POOL * max(point.chunks, point.batch) for point in points.values())
    lengths = {point.chunk_tokens for point in points.values()}
    pieces = [piece for tokens in sorted(lengths) for piece in text_pieces(tokenizer, pool, tokens)]
    tiers = LOCAL | servers_of(settings)
    stores: dict[tuple[str, str], TrialStore] = {}
    for point in points.values():
        if point.store not in stores:
            progress.note(f"ingest: {point.codec} in {point.tier}")
            own = settings.model_copy(update={"codec": point.codec})
            stores[point.store] = opened.enter_context(trial_store(engine, own, tiers[point.tier], pieces))
    jobs: dict[tuple[Any, ...], Job] = {}

    def job(arm: Arm, point: Point, *own: Any) -> Job:
        """The one of this arm on these prompts from this store: made when it is first asked for."""
        known = (arm.name, point.prompts, *own)
        if known not in jobs:
            rounds = _rounds(maker, tokenizer, stores[point.store], point, options)
            check_length([trial for trials in rounds for trial in trials], engine.max_model_len)
            jobs[known] = Job(arm, rounds)
        return jobs[known]

    def blending(point: Point, ratio: float) -> Blending:
        store = stores[point.store]
        recipe = recipe_of(settings, store.id, ratio)
        return Blending(recipe) if point.tier == "ram" else FromTier(f"{point.tier}@{ratio:g}", recipe, store)

    return {
        value: {
            "full": job(FullPrefill(), point),
            "prefix": job(PrefixCaching(), point),
            "reuse": job(blending(point, 0.0), point, point.store),
            "blended": job(blending(point, point.ratio), point, point.store),
        }
        for value, point in points.items()
    }


def _rounds(
    maker: PromptMaker, tokenizer: Any, store: TrialStore, point: Point, options: SweepOptions
) -> list[list[Trial]]:
    """The same prompts whichever store they are from; the first round is the warm-up."""
    rng = random.Random(f"{options.seed} {point.prompts}")
    own = [chunk for chunk in store.chunks if len(chunk.token_ids) == point.chunk_tokens]
    asked = questions_of(tokenizer, point.question_tokens) if point.question_tokens else QUESTIONS
    rounds: list[list[Trial]] = []
    for number in range(options.repeats + 1):
        batch: dict[str, Trial] = {}  # by first chunk: none of a batch may find its own in the prefix cache
        while len(batch) < point.batch:
            trial = maker.trial(own, point.chunks, rng, number, asked)
            batch.setdefault(trial.prompt.spans[0][0], trial)
        rounds.append(list(batch.values()))
    return rounds


def measure_in_turns(
    engine: Engine, cases: Mapping[Value, Mapping[str, Job]], progress: BenchProgress
) -> dict[Job, list[list[Sample]]]:
    """Per job and repeat the samples of its prompts. Every repeat runs all jobs, and begins with another."""
    jobs = list(dict.fromkeys(job for case in cases.values() for job in case.values()))
    samples: dict[Job, list[list[Sample]]] = {job: [] for job in jobs}
    rounds = len(jobs[0].rounds)
    progress.total(len(jobs) * rounds)
    for number in range(rounds):
        shift = number * len(jobs) // rounds
        for job in (*jobs[shift:], *jobs[:shift]):
            what = f"repeat {number} of {rounds - 1}" if number else "warm-up"
            progress.note(f"{what}: {job.arm.name}")
            found = job.arm.run_together(engine, job.rounds[number])
            if number:
                samples[job].append(found)
            progress.step()
    return samples


def summarise_point(samples: Mapping[str, Sequence[Sequence[Sample]]]) -> dict[str, dict[str, Any]]:
    """Per arm what ``statistics.summarise`` says, the times being means over the prompts sent at once.

    each_ms: [repeats][prompts] of TTFT. speedup_vs_full, speedup_vs_prefix: of the means, repeat by repeat.
    """
    flat = {name: [sample for batch in own for sample in batch] for name, own in samples.items()}
    each = {name: [[sample.ttft_ms for sample in batch] for batch in own] for name, own in samples.items()}
    means = {name: np.mean(times, axis=1) for name, times in each.items()}
    return {
        name: found
        | {f"speedup_vs_{other}": spread(means[other] / means[name]) for other in ("full", "prefix")}
        | {"ttft_ms": spread(means[name]), "each_ms": each[name]}
        for name, found in summarise(flat).items()
    }
