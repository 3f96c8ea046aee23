"""Estimates beside measurements: a few prompts of a plan, run on the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from blendrag.control.choose import ChunkCost, Controller
from blendrag.control.estimate import Estimator
from blendrag.control.plan import Corpus
from blendrag.engine.client.engine import Engine
from blendrag.lab.profiling.runs import Run, blend_run, interleaved, prefill_run
from blendrag.lab.progress import BenchProgress
from blendrag.lab.prompts import QUESTIONS, Prompt, PromptMaker
from blendrag.lab.texts import text_pieces
from blendrag.lab.trial_store import TrialStore, trial_store
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
    settings: Settings, estimate: Estimator, corpus: Corpus, ratio: float, progress: BenchProgress
) -> list[Checked]:
    """Run a prompt of ``corpus.top_k`` chunks: plainly; from each measured tier of the stack at ``ratio``;
    and as mode C would have it. Disks are cold. The least time of each, as profiles have it.

    Raises PromptTooLongError, ConfigError (too little text), StoreError, EngineError.
    """
    from transformers import AutoTokenizer

    engine = Engine.shared(settings, progress.note)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(engine.model_path))
        progress.note("cutting text into chunks")
        pieces = text_pieces(tokenizer, corpus.top_k, corpus.chunk_tokens)
        maker = PromptMaker(tokenizer, system_prompt=settings.system_prompt, separator=settings.separator)
        with contextlib.ExitStack() as stack:
            stores = [
                stack.enter_context(trial_store(engine, settings, spec, pieces))
                for spec in settings.stack
                if spec.label in estimate.tiers
            ]
            runs = _runs(engine, settings, estimate, corpus, ratio, stores, maker)
            progress.total((_REPEATS + 1) * len(runs))
            times = interleaved({key: run for key, (_, run) in runs.items()}, _REPEATS, progress, "checking")
        return [
            Checked(tier, what, seconds, min(ttft for ttft, _ in times[tier, what]))
            for (tier, what), (seconds, _) in runs.items()
        ]
    finally:
        engine.release()


def _runs(
    engine: Engine,
    settings: Settings,
    estimate: Estimator,
    corpus: Corpus,
    ratio: float,
    stores: Sequence[TrialStore],
    maker: PromptMaker,
) -> dict[tuple[str, str], tuple[float, Run]]:
    """(tier, what): the estimate, and what is to be measured."""
    runs: dict[tuple[str, str], tuple[float, Run]] = {}
    for store in stores:
        prompt = maker.make(store.chunks, QUESTIONS[0])
        total, cached = len(prompt.token_ids), prompt.chunk_tokens()
        fresh = total - cached
        runs["", "plain prefill"] = (estimate.prefill_s(0, total), prefill_run(engine, prompt.token_ids))
        load = estimate.load_s(len(store.chunks) * corpus.chunk_bytes, store.tier)
        seconds = estimate.blend_s(load, estimate.recompute_s(cached, fresh, ratio), ratio)
        runs[store.tier, f"ratio {ratio:g}"] = seconds, blend_run(engine, settings, store, prompt, ratio)
        costs = [ChunkCost(len(chunk.token_ids), corpus.chunk_bytes, store.tier) for chunk in store.chunks]
        auto = Controller(estimate, ratio).decide(costs, fresh, None)
        if any(auto.load):
            part = _only(prompt, auto.load)
            what = f"as chosen: {sum(auto.load)} chunks, ratio {auto.ratio:.2f}"
            runs[store.tier, what] = auto.blend_s, blend_run(engine, settings, store, part, auto.ratio)
    return runs


def _only(prompt: Prompt, load: Sequence[bool]) -> Prompt:
    chosen = (span for span, wanted in zip(prompt.spans, load, strict=True) if wanted)
    return replace(prompt, spans=tuple(chosen))
