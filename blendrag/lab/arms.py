"""The arms of the comparison: ways to the first token of one and the same prompt."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.generation import Delta, Sampling
from blendrag.engine.recipe import Recipe
from blendrag.engine.report import BlendReport
from blendrag.errors import EngineError
from blendrag.lab.prompts import Trial
from blendrag.settings import Settings

TOP = 20  # log probabilities asked for: as many as vLLM gives by default
_FIRST_TOKEN = Sampling(max_tokens=1, logprobs=TOP)
_RESET_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed request.

    recomputed: tokens of chunks that were computed, though their KV was known before.
    logprobs: {token id: log probability} of the first token's candidates.
    split_ms: milliseconds of load, select and recompute; none for plain prefill.
    """

    ttft_ms: float
    token: int
    logprobs: dict[int, float]
    recomputed: int
    split_ms: dict[str, float]


class Arm(ABC):
    """A way to the first token. ``name`` is its key in the results."""

    name: str

    async def prepare(self, engine: Engine, trials: Sequence[Trial]) -> None:
        """Before the clock starts: nothing of earlier requests is left in the prefix cache."""
        reset(engine)

    @abstractmethod
    async def ask(self, engine: Engine, trial: Trial) -> Sample:
        """Time ``trial.prompt``."""

    def run(self, engine: Engine, trial: Trial) -> Sample:
        """Prepared and timed."""
        (sample,) = self.run_together(engine, [trial])
        return sample

    def run_together(self, engine: Engine, trials: Sequence[Trial]) -> list[Sample]:
        """Prepared, then all asked at once."""

        async def all_at_once() -> list[Sample]:
            await self.prepare(engine, trials)
            return await asyncio.gather(*(self.ask(engine, trial) for trial in trials))

        return asyncio.run(all_at_once())


class FullPrefill(Arm):
    """Plain prefill of the whole prompt: the reference."""

    name = "full"

    async def ask(self, engine: Engine, trial: Trial) -> Sample:
        delta = await engine.agenerate(trial.prompt.token_ids, _FIRST_TOKEN)
        return _sample(delta, trial.prompt.chunk_tokens(), {})


class PrefixCaching(Arm):
    """vLLM's prefix caching after the same chunks were seen in another order: the common prefix hits."""

    name = "prefix"

    async def prepare(self, engine: Engine, trials: Sequence[Trial]) -> None:
        await super().prepare(engine, trials)
        for trial in trials:
            await engine.agenerate(trial.reordered.token_ids, _FIRST_TOKEN)

    async def ask(self, engine: Engine, trial: Trial) -> Sample:
        delta = await engine.agenerate(trial.prompt.token_ids, _FIRST_TOKEN)
        return _sample(delta, trial.prompt.chunk_tokens(delta.prefix_tokens), {})


class Blending(Arm):
    """Stored KV, with the recompute ratio of it recomputed. Ratio 0 is full reuse.

    ``report``: what the engine says of the last run.
    """

    misses_allowed = False

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.report = BlendReport()
        ratio = recipe.options.recompute_ratio
        self.name = f"blend@{ratio:g}" if ratio else "reuse"

    async def ask(self, engine: Engine, trial: Trial) -> Sample:
        recipe = replace(self._recipe, spans=trial.prompt.spans)
        delta = await engine.agenerate(trial.prompt.token_ids, _FIRST_TOKEN, recipe)
        self.report = check_blended(self.name, delta.report, misses_allowed=self.misses_allowed)
        return _sample(delta, self.report.recomputed, self.report.ms)


def check_blended(name: str, report: BlendReport | None, *, misses_allowed: bool = False) -> BlendReport:
    """The report; raises EngineError unless it says that the request was blended, all chunks of it.

    What was prefilled plainly instead has a time and an answer, too, and they are not those of ``name``.
    """
    report = report or BlendReport(fallback="the engine gave no report")
    problem = report.fallback if misses_allowed else report.problem
    if problem:
        raise EngineError(f"{name} was not blended, so its numbers would mean nothing: {problem}")
    return report


def recipe_of(settings: Settings, store: str, ratio: float | None = None) -> Recipe:
    """The settings' recipe but for its spans, over the opened store of this id. ratio: instead of theirs."""
    options = settings.blending
    return Recipe(store, (), options if ratio is None else replace(options, recompute_ratio=ratio))


def make_arms(base: Recipe, ratios: Sequence[float]) -> list[Arm]:
    """All arms, the reference first. ``base``: the recipe, but for its ratio and spans."""
    options = (replace(base.options, recompute_ratio=ratio) for ratio in (0.0, *ratios))
    return [FullPrefill(), PrefixCaching(), *(Blending(replace(base, options=one)) for one in options)]


def reset(engine: Engine) -> None:
    """Empty the prefix cache; a request that has just ended may hold it for a moment yet."""
    deadline = time.monotonic() + _RESET_TIMEOUT_S
    while not engine.reset_prefix_cache():
        if time.monotonic() > deadline:
            raise EngineError("the prefix cache cannot be emptied: other requests are using this engine")
        time.sleep(0.01)


def _sample(delta: Delta, recomputed: int, split_ms: dict[str, float]) -> Sample:
    return Sample(1e3 * delta.ttft_s, delta.token_ids[0], delta.logprobs[0], recomputed, split_ms)
