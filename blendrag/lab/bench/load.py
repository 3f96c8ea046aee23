"""Throughput under an open-loop load of prompts with re-used chunks (CacheBlend figure 14)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.table import Table

from blendrag.engine.wire.recipe import Recipe
from blendrag.lab.arms import Asked, recipe_of, reset
from blendrag.lab.bench.open_loop import Alone, Loaded, OpenLoop, Run, arrival_times, load_tables
from blendrag.lab.bench.timed import Timed
from blendrag.lab.options import LoadOptions
from blendrag.lab.prompts import Prompt, PromptMaker, check_prompts
from blendrag.lab.results import Setup, where
from blendrag.lab.running import blending_engine
from blendrag.lab.scratch import scratch_store
from blendrag.lab.texts import text_pieces
from blendrag.progress import Progress
from blendrag.settings import Settings
from blendrag.store.stack import TierSpec

_LEAST, _STEP = 0.5, 1.25  # lowest rate, as a share of the arm's own without load; factor to the next rate
_ALONE = 5  # requests, one after another
PROMPTS = 40  # different ones, asked again and again


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResults(Loaded[LoadOptions]):
    """Results of ``bench load``."""

    def parts(self) -> Iterator[Table | str]:
        """Yield what arms did at each rate, and what they sustain."""
        setup, options = self.setup, self.setup.options
        plain = sum(run.not_blended for arm in self.arms.values() for run in arm.runs)
        yield from load_tables(self.arms, self.bound_ms)
        if plain:
            yield f"Of the blended arm {plain:,} requests were prefilled instead."
        yield (
            f"Sustained: the most answers a second while p95 of TTFT is {self.bound_ms:,.0f} ms at most"
            " (> marks more). TTFT: from when a request was due. alone: TTFT of requests one after another."
            f" {PROMPTS} prompts of {options.chunks} chunks of {options.chunk_tokens}"
            f" tokens, out of {options.pool} chunks: {setup.prompt_tokens[0]:,} to"
            f" {setup.prompt_tokens[-1]:,} tokens, answers of {options.max_tokens}; {options.seconds:g} s a"
            f" rate; {setup.settings.blending.recompute_ratio:.0%} recomputed. {where(setup.machine)}."
        )


def run_load(settings: Settings, options: LoadOptions, progress: Progress) -> LoadResults:
    """Measure throughput: at one rate all arms are sent the same prompts at the same times, from an empty
    prefix cache.

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
            load = _Load(
                engine, progress, options.max_tokens, recipe_of(settings, store.id), prompts, options
            )
            arms, bound_ms = asyncio.run(load.measure(("full", "prefix", "blended"), 1, options.tries))
            reset(engine)  # waits until it has let go of what was cut off
        return LoadResults(arms=arms, bound_ms=bound_ms, setup=Setup.of(engine, settings, options, prompts))


@dataclass
class _Load(OpenLoop[Prompt]):
    recipe: Recipe
    prompts: Sequence[Prompt]
    options: LoadOptions
    alone: Iterator[int] = field(default_factory=itertools.count)

    def asked(self, arm: str, prompt: Prompt) -> Asked:
        """Return how it is sent: by full prefill, in a namespace of its own, where nobody's KV is found. The
        engine's prefix caching is left as it is for the two others; it finds blended KV again, too."""
        namespace = f"alone-{next(self.alone)}" if arm == "full" else ""
        recipe = replace(self.recipe, spans=prompt.spans) if arm == "blended" else None
        return Asked(prompt.token_ids, recipe, namespace)

    async def one_by_one(self, arm: str, block: int) -> list[Timed]:
        reset(self.engine)
        asked = itertools.islice(itertools.cycle(self.prompts), _ALONE + 1)  # the first one warms up
        return [await self.ask(arm, prompt) for prompt in asked][1:]

    async def at_rate(self, arm: str, number: int, alone: Mapping[str, Alone], bound_ms: float) -> Run:
        seconds, rate = self.options.seconds, _LEAST * _STEP**number * 1e3 / alone[arm].total_ms
        times = arrival_times(rate, seconds, self.options.seed)
        reset(self.engine)
        return await self.send(arm, rate, self.prompts, times, seconds, bound_ms)
