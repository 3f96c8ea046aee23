"""Estimates beside measurements: a few prompts of a plan, run on the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from blendrag.control.choose import ChunkCost, Controller
from blendrag.control.estimate import Estimator
from blendrag.control.plan import Corpus
from blendrag.lab.arms import Arm, BlendedPrefill, FullPrefill, recipe_of
from blendrag.lab.experiment import measure
from blendrag.lab.profiling.measure import repeated
from blendrag.lab.prompts import QUESTIONS, Prompt, PromptMaker
from blendrag.lab.running import blending_engine
from blendrag.lab.scratch import ScratchStore, scratch_store
from blendrag.lab.texts import text_pieces
from blendrag.progress import Progress
from blendrag.settings import Settings

_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Checked:
    """Seconds to the first token of one way to answer a prompt of the corpus. error: relative, signed."""

    tier: str
    what: str
    estimated_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.estimated_s / self.measured_s - 1.0


def check_plan(
    settings: Settings, estimate: Estimator, corpus: Corpus, ratio: float, progress: Progress
) -> list[Checked]:
    """Run a prompt of ``corpus.top_k`` chunks: plainly; from each measured tier of the stack at ``ratio``;
    and as mode C would have it. Disks are cold. The least time of each, as profiles have it.

    Raises PromptTooLongError, ConfigError (too little text), StoreError, EngineError.
    """
    with blending_engine(settings, progress) as engine:
        maker = PromptMaker.of(engine, settings)
        progress.note("cutting text into chunks")
        pieces = text_pieces(maker.tokenizer, corpus.top_k, corpus.chunk_tokens)
        with contextlib.ExitStack() as stack:
            stores = [
                stack.enter_context(scratch_store(engine, settings, pieces, spec))
                for spec in settings.stack
                if spec.label in estimate.tiers
            ]
            arms = _arms(settings, estimate, corpus, ratio, stores, maker)
            times = measure(engine, {way: arm for way, (_, arm) in arms.items()}, progress)
        return [
            Checked(tier, what, seconds, min(sample.ttft_ms for sample in times[tier, what]) / 1e3)
            for (tier, what), (seconds, _) in arms.items()
        ]


def _arms(
    settings: Settings,
    estimate: Estimator,
    corpus: Corpus,
    ratio: float,
    stores: Sequence[ScratchStore],
    maker: PromptMaker,
) -> dict[tuple[str, str], tuple[float, Arm]]:
    """(tier, what): the estimate, and what is to be measured."""
    arms: dict[tuple[str, str], tuple[float, Arm]] = {}

    def blend(store: ScratchStore, prompt: Prompt, ratio: float) -> Arm:
        return BlendedPrefill(repeated(prompt, _REPEATS), recipe_of(settings, store.id, ratio), store)

    for store in stores:
        prompt = maker.make(store.chunks, QUESTIONS[0])
        total, cached = len(prompt.token_ids), prompt.chunk_tokens()
        fresh = total - cached
        arms["", "plain prefill"] = (estimate.prefill_s(0, total), FullPrefill(repeated(prompt, _REPEATS)))
        load = estimate.load_s(len(store.chunks) * corpus.chunk_bytes, store.tier)
        seconds = estimate.blend_s(load, estimate.recompute_s(cached, fresh, ratio), ratio)
        arms[store.tier, f"ratio {ratio:g}"] = seconds, blend(store, prompt, ratio)
        costs = [ChunkCost(len(chunk.token_ids), corpus.chunk_bytes, store.tier) for chunk in store.chunks]
        auto = Controller(estimate, ratio).decide(costs, fresh, None)
        if any(auto.load):
            what = f"as chosen: {sum(auto.load)} chunks, ratio {auto.ratio:.2f}"
            arms[store.tier, what] = auto.blend_s, blend(store, _only(prompt, auto.load), auto.ratio)
    return arms


def _only(prompt: Prompt, load: Sequence[bool]) -> Prompt:
    chosen = (span for span, wanted in zip(prompt.spans, load, strict=True) if wanted)
    return replace(prompt, spans=tuple(chosen))
