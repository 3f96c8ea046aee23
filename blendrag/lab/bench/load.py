"""Throughput under an open-loop load of prompts with re-used chunks (CacheBlend figure 14)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from blendrag.engine.client.engine import Engine
from blendrag.errors import ConfigError
from blendrag.lab.arms import recipe_of, reset
from blendrag.lab.bench.open_loop import (
    Alone,
    Asked,
    LoadArm,
    OpenLoop,
    Run,
    Ways,
    arrival_times,
    compare_arms,
)
from blendrag.lab.experiment import in_turn
from blendrag.lab.prompts import Prompt, PromptMaker, check_prompts
from blendrag.lab.running import blending_engine
from blendrag.lab.scratch import ScratchStore, scratch_store
from blendrag.lab.setup import Setup
from blendrag.lab.texts import text_pieces
from blendrag.progress import Progress
from blendrag.settings import Settings
from blendrag.store.stack import TierSpec

_LEAST, _STEP = 0.5, 1.25  # lowest rate, as a share of the arm's own without load; factor to the next rate
_ALONE = 5  # requests, one after another
PROMPTS = 40  # different ones, asked again and again


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of ``bench load``.

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
class LoadResults:
    """Results of ``bench load``. arms: full, prefix, blended. bound_ms: of p95 TTFT, twice full prefill's
    without load."""

    arms: dict[str, LoadArm]
    bound_ms: float
    setup: Setup[LoadOptions]

    def to_dict(self) -> dict[str, Any]:
        arms = {name: asdict(arm) for name, arm in self.arms.items()}
        return {"arms": arms, "bound_ms": self.bound_ms} | self.setup.to_dict()


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
            ways = _ways(settings, store)
            arms, bound_ms = asyncio.run(_measured(engine, prompts, ways, options, progress))
        return LoadResults(arms, bound_ms, Setup.of(engine, settings, options, prompts))


def _ways(settings: Settings, store: ScratchStore) -> Ways[Prompt]:
    """Return how each arm asks. Full prefill is a namespace of its own per request: nobody's KV is found
    there. The engine's prefix caching is left as it is for the two others; it finds blended KV again, too."""
    alone, recipe = itertools.count(), recipe_of(settings, store.id)
    return {
        "full": lambda prompt: Asked(prompt.token_ids, namespace=f"alone-{next(alone)}"),
        "prefix": lambda prompt: Asked(prompt.token_ids),
        "blended": lambda prompt: Asked(prompt.token_ids, replace(recipe, spans=prompt.spans)),
    }


async def _measured(
    engine: Engine, prompts: Sequence[Prompt], ways: Ways[Prompt], options: LoadOptions, progress: Progress
) -> tuple[dict[str, LoadArm], float]:
    """Return the arms, and the bound."""
    loop = OpenLoop(engine, ways, options.max_tokens)
    alone: dict[str, Alone] = {}
    for turn in in_turn(ways, range(1), progress, warm_up=0):
        reset(engine)
        asked = itertools.islice(itertools.cycle(prompts), _ALONE + 1)  # the first one warms up
        alone[turn.key] = Alone.of([await loop.ask(turn.key, prompt) for prompt in asked][1:])
    bound_ms = 2 * alone["full"].ttft_ms
    runs: dict[str, list[Run]] = {arm: [] for arm in ways}
    for turn in in_turn(ways, range(options.tries), progress, warm_up=0):
        rate = _LEAST * _STEP**turn.trial * 1e3 / alone[turn.key].total_ms
        times = arrival_times(rate, options.seconds, options.seed)
        reset(engine)
        runs[turn.key].append(await loop.run(turn.key, rate, prompts, times, options.seconds, bound_ms))
    reset(engine)  # waits until it has let go of what was cut off
    return compare_arms(alone, runs, bound_ms), bound_ms
