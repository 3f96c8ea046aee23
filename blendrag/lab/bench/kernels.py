"""``bench kernels``: the pieces of a layer against the floor of this machine's arithmetic, at the shape of
blends that were just served."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from blendrag.engine.client.engine import Engine
from blendrag.engine.recipe import Recipe
from blendrag.errors import ConfigError
from blendrag.lab.arms import PARTS, Blending
from blendrag.lab.bench.floors import CHECK_LAYER, analyse
from blendrag.lab.experiment import measure
from blendrag.lab.prompts import PromptMaker, check_prompts
from blendrag.lab.running import blending_engine
from blendrag.lab.scratch import scratch_store
from blendrag.lab.statistics import spread
from blendrag.lab.texts import text_pieces
from blendrag.machine import describe_machine
from blendrag.options import BlendOptions
from blendrag.progress import Progress
from blendrag.settings import Settings

_BLENDS = 7


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """The blend whose layer is measured: ``ratio`` of ``chunks`` of ``chunk_tokens`` tokens recomputed by
    HKVD. ``repeats``: how often each piece is timed."""

    chunks: int = 6
    chunk_tokens: int = 512
    ratio: float = 0.15
    repeats: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.ratio < 1.0:
            raise ConfigError(f"--ratio must be above 0 and below 1, not {self.ratio:g}")


def run_kernels(settings: Settings, options: KernelOptions, progress: Progress) -> dict[str, Any]:
    """Measure; the results, JSON-able:

    rates, pieces, layer, blend: what ``floors.analyse`` says; in ``blend`` also ``ttft_ms`` (median, p10,
        p90) and ``split_ms`` (medians) of blends of this shape, served in the same run.
    shape: the layer's. machine, config: as ``run_ttft``.

    Raises ConfigError, ModelError (also for a model whose layers run whole), PromptTooLongError, EngineError.
    """
    with blending_engine(settings, progress) as engine:
        return _measure(engine, settings, options, progress)


def _measure(
    engine: Engine, settings: Settings, options: KernelOptions, progress: Progress
) -> dict[str, Any]:
    maker = PromptMaker.of(engine, settings)
    progress.note("cutting text into chunks")
    pieces = text_pieces(maker.tokenizer, options.chunks, options.chunk_tokens)
    with scratch_store(engine, settings, pieces, filled=False) as store:
        rng = random.Random(options.seed)
        trials = [maker.trial(store.chunks, options.chunks, rng, n) for n in range(_BLENDS + 1)]
        check_prompts([trial.prompt for trial in trials], engine.max_model_len)
        progress.total(2)
        prompt = trials[0].prompt
        spans = [[start, length] for _, start, length in prompt.spans]
        progress.note("timing a layer's pieces")
        measured = engine.call("kernels", len(prompt.token_ids), spans, options.ratio, options.repeats)
        progress.advance()
        progress.note("ingest")
        store.fill(store.chunks)
        progress.advance()
        recipe = Recipe(store.id, (), BlendOptions(options.ratio, "hkvd", check_layers=(CHECK_LAYER,)))
        arm = Blending([[trial] for trial in trials], recipe)
        served = measure(engine, {arm.name: arm}, progress)[arm.name]
    found = analyse(measured, engine.facts["mask"])
    found["blend"] |= {
        "ttft_ms": asdict(spread([sample.ttft_ms for sample in served])),
        "split_ms": {part: float(np.median([s.split_ms.get(part, 0.0) for s in served])) for part in PARTS},
    }
    return found | {
        "shape": measured["shape"],
        "machine": describe_machine(settings.model, engine.facts),
        "config": asdict(options) | {"mask": engine.facts["mask"], "mask_ms": engine.facts["mask_ms"]},
    }
