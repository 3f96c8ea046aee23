"""Where the KV is, and what it costs: time to first token per tier, on the same prompts, in turn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from blendrag.engine.client.engine import Engine
from blendrag.engine.recipe import Recipe
from blendrag.lab.arms import Arm, Blending, FullPrefill, Sample, recipe_of
from blendrag.lab.progress import BenchProgress
from blendrag.lab.prompts import PromptMaker, StoredChunk, Trial
from blendrag.lab.reading import reading_speed
from blendrag.lab.running import blending_engine
from blendrag.lab.statistics import spread, summarise
from blendrag.lab.texts import text_pieces
from blendrag.lab.trial_store import TrialStore, trial_store
from blendrag.load.trace import Event
from blendrag.machine import describe_machine
from blendrag.settings import Settings
from blendrag.store.record import Layout
from blendrag.store.stack import TierSpec

LOCAL = {"ram": TierSpec(kind="ram"), "disk": TierSpec(kind="disk")}
_POOL = 2  # chunks in a store, per chunk of a prompt


@dataclass(frozen=True, slots=True)
class TierBenchOptions:
    """What is measured. slow_disk: bytes per second of the disk that is slowed down."""

    chunks: int = 6
    chunk_tokens: int = 512
    repeats: int = 9
    ratio: float = 0.15
    slow_disk: int = 200_000_000
    seed: int = 0


def tiers_of(settings: Settings, options: TierBenchOptions) -> dict[str, TierSpec]:
    """The tiers that are compared, by name: RAM, disk, a slowed disk, and every server that is configured and
    may be written."""
    slow = f"disk at {options.slow_disk / 1e6:g} MB/s"
    return LOCAL | {slow: TierSpec(kind="disk", throttle=options.slow_disk)} | servers_of(settings)


def servers_of(settings: Settings) -> dict[str, TierSpec]:
    """Every server that is configured and may be written, by name."""
    servers = (spec for spec in settings.tiers if spec.kind in ("redis", "object"))
    return {spec.label: spec for spec in servers if spec.writes != "never"}


def run_tiers(settings: Settings, options: TierBenchOptions, progress: BenchProgress) -> dict[str, Any]:
    """Measure; the results, JSON-able:

    arms: per arm (full, miss, and each tier) what ``statistics.summarise`` says. ratios: the TTFT of two
    arms, repeat by repeat. traces: per tier the events of its median request. reading:
    ``reading.reading_speed``.

    Raises ConfigError, ModelError, StoreError, EngineError.
    """
    with blending_engine(settings, progress) as engine:
        return _measure(engine, settings, options, progress)


def _measure(
    engine: Engine, settings: Settings, options: TierBenchOptions, progress: BenchProgress
) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(engine.model_path))
    pieces = text_pieces(tokenizer, _POOL * options.chunks, options.chunk_tokens)
    maker = PromptMaker(tokenizer, system_prompt=settings.system_prompt, separator=settings.separator)
    tiers = tiers_of(settings, options)
    progress.total(len(tiers) + (2 + len(tiers)) * (options.repeats + 1))
    with ExitStack() as opened:
        stores: dict[str, TrialStore] = {}
        for name, spec in tiers.items():
            progress.note(f"ingest: {name}")
            stores[name] = opened.enter_context(trial_store(engine, settings, spec, pieces))
            progress.step()
        arms: dict[Arm, Sequence[StoredChunk]] = {FullPrefill(): stores["ram"].chunks}
        base = recipe_of(settings, "", options.ratio)
        unknown = [StoredChunk(f"no {chunk.key}", chunk.token_ids) for chunk in stores["ram"].chunks]
        arms[_Miss(replace(base, store=stores["ram"].id))] = unknown
        for name, store in stores.items():
            arms[_Traced(name, replace(base, store=store.id), store)] = store.chunks
        samples = _interleaved(engine, arms, maker, options, progress)
        layout = Layout(stores["disk"].identity, engine.facts["dtype"])
        reading = reading_speed(Path(stores["disk"].id) / "kv", layout)
    return {
        "arms": summarise(samples),
        "ratios": _ratios(samples, list(stores)),
        "traces": {arm.name: arm.trace for arm in arms if isinstance(arm, _Traced)},
        "reading": reading,
        "machine": describe_machine(settings.model, engine.facts),
        "config": asdict(options) | {"codec": settings.codec, "layers_in_flight": settings.layers_in_flight},
    }


class _Miss(Blending):
    """Every chunk turns out to be missing: what blending costs where it saves nothing."""

    misses_allowed = True

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.name = "miss"


class FromTier(Blending):
    """Blending from one tier. RAM has been filled by the same prompt just before; files are read cold."""

    def __init__(self, name: str, recipe: Recipe, store: TrialStore) -> None:
        super().__init__(recipe)
        self.name, self._store = name, store

    async def prepare(self, engine: Engine, trials: Sequence[Trial]) -> None:
        if self._store.tier == "ram":
            await super().prepare(engine, trials)
            for trial in trials:
                await super().ask(engine, trial)
        else:
            self._store.make_cold()
        await super().prepare(engine, trials)


class _Traced(FromTier):
    """Its recipe asks for a trace."""

    def __init__(self, name: str, recipe: Recipe, store: TrialStore) -> None:
        super().__init__(name, replace(recipe, options=replace(recipe.options, trace=True)), store)
        self._traces: list[tuple[float, Sequence[Event]]] = []

    @property
    def trace(self) -> Sequence[Event]:
        """Of the request in the middle, by its time to the first token."""
        by_time = sorted(self._traces, key=lambda pair: pair[0])
        return by_time[len(by_time) // 2][1]

    async def ask(self, engine: Engine, trial: Trial) -> Sample:
        sample = await super().ask(engine, trial)
        self._traces.append((sample.ttft_ms, self.report.trace))
        return sample


def _interleaved(
    engine: Engine,
    arms: dict[Arm, Sequence[StoredChunk]],
    maker: PromptMaker,
    options: TierBenchOptions,
    progress: BenchProgress,
) -> dict[str, list[Sample]]:
    """Samples per arm; the first round warms up, each later one begins with another arm."""
    samples: dict[str, list[Sample]] = {arm.name: [] for arm in arms}
    order = list(arms)
    for number in range(options.repeats + 1):
        progress_note = f"repeat {number} of {options.repeats}" if number else "warm-up"
        shift = number % len(order)
        for arm in (*order[shift:], *order[:shift]):
            progress.note(f"{progress_note}: {arm.name}")
            rng = random.Random(f"{options.seed} {number}")  # the same texts for all arms
            sample = arm.run(engine, maker.trial(arms[arm], options.chunks, rng, number))
            if number:
                samples[arm.name].append(sample)
            progress.step()
    return samples


def _ratios(samples: dict[str, list[Sample]], tiers: Sequence[str]) -> dict[str, dict[str, float]]:
    def paired(name: str, reference: str) -> dict[str, float]:
        pairs = zip(samples[name], samples[reference], strict=True)
        return spread([one.ttft_ms / other.ttft_ms for one, other in pairs])

    load = spread([sample.split_ms["load"] / sample.ttft_ms for sample in samples["ram"]])
    against_ram = {f"{name} / ram": paired(name, "ram") for name in tiers if name != "ram"}
    return {"load / TTFT, ram": load, **against_ram, "miss / full": paired("miss", "full")}
