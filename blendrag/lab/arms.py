"""The arms of the comparison: ways to the first token of one and the same prompt."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.generation import Delta, Sampling
from blendrag.engine.client.running import RunningEngine
from blendrag.engine.wire.recipe import Recipe
from blendrag.engine.wire.report import BlendReport
from blendrag.errors import EngineError
from blendrag.lab.prompts import Trial
from blendrag.lab.scratch import ScratchStore, ScratchTree
from blendrag.settings import Settings

PARTS = ("load", "select", "recompute")
TOP = 20  # log probabilities asked for: as many as vLLM gives by default
_FIRST_TOKEN = Sampling(max_tokens=1, logprobs=TOP)
_RESET_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed request: what ``arm`` took for the first token of a prompt.

    recomputed: tokens of chunks that were computed, though their KV was known before.
    logprobs: {token id: log probability} of the first token's candidates.
    split_ms: milliseconds of load, select and recompute; none for plain prefill.
    """

    arm: str
    ttft_ms: float
    token: int
    logprobs: dict[int, float]
    recomputed: int
    split_ms: dict[str, float]

    @property
    def fused_ms(self) -> float:
        """Milliseconds that the blend took; the rest is the engine's."""
        return sum(self.split_ms.get(part, 0.0) for part in PARTS)


class Arm(ABC):
    """A way to the first token. ``name`` is its key in the results."""

    name: str

    def __init__(self, trials: Sequence[Trial]) -> None:
        self.trials = trials

    async def prepare(self, engine: Engine, trial: Trial) -> None:
        """Prepare, before the clock starts: nothing of earlier requests is left in the prefix cache."""
        reset(engine)

    @abstractmethod
    async def ask(self, engine: Engine, trial: Trial) -> Sample:
        """Time ``trial.prompt``."""

    def run(self, engine: Engine, number: int) -> Sample:
        """Prepare a trial, and ask its prompt."""

        async def prepared() -> Sample:
            await self.prepare(engine, self.trials[number])
            return await self.ask(engine, self.trials[number])

        return asyncio.run(prepared())

    def sample(self, delta: Delta, recomputed: int, split_ms: dict[str, float]) -> Sample:
        first = delta.token_ids[0], delta.logprobs[0]
        return Sample(self.name, 1e3 * delta.ttft_s, *first, recomputed, split_ms)


class FullPrefill(Arm):
    """Plain prefill of the whole prompt: the reference."""

    name = "full"

    async def ask(self, engine: Engine, trial: Trial) -> Sample:
        delta = await engine.agenerate(trial.prompt.token_ids, _FIRST_TOKEN)
        return self.sample(delta, trial.prompt.chunk_tokens(delta.prefix_tokens), {})


class PrefixCaching(FullPrefill):
    """vLLM's prefix caching, after the same chunks were asked in another order: the common prefix hits."""

    name = "prefix"

    async def prepare(self, engine: Engine, trial: Trial) -> None:
        await super().prepare(engine, trial)
        if trial.before.token_ids:
            await engine.agenerate(trial.before.token_ids, _FIRST_TOKEN)


class ExactPrefix(Arm):
    """Loading of the prompt's own KV up to its question, as full prefill has made it before. cold: from disk,
    instead of RAM."""

    def __init__(self, trials: Sequence[Trial], tree: ScratchTree, *, cold: bool = False) -> None:
        super().__init__(trials)
        self._tree, self._cold = tree, cold
        self.name = "exact cold" if cold else "exact"

    async def prepare(self, engine: Engine, trial: Trial) -> None:
        await super().prepare(engine, trial)
        self._tree.hold(trial.prompt)
        if self._cold:
            self._tree.make_cold()
        await super().prepare(engine, trial)

    async def ask(self, engine: Engine, trial: Trial) -> Sample:
        path = self._tree.path(trial.prompt)
        delta = await engine.agenerate(trial.prompt.token_ids, replace(_FIRST_TOKEN, path=path))
        report = check_blended(self.name, delta.report)
        if report.exact != path.held_end:
            raise EngineError(f"{self.name}: {report.exact} of {path.held_end} tokens came from the tree")
        return self.sample(delta, 0, report.ms)


class BlendedPrefill(Arm):
    """Blended prefill: stored KV, with the recompute ratio of it recomputed. Ratio 0 is full reuse.

    recipe: but for its spans. store: read cold, where that is not RAM; None: as it comes. name: instead of
    one that says the ratio.
    """

    def __init__(
        self, trials: Sequence[Trial], recipe: Recipe, store: ScratchStore | None = None, name: str = ""
    ) -> None:
        super().__init__(trials)
        self._recipe, self._store = recipe, store
        ratio = recipe.options.recompute_ratio
        self.name = name or (f"blend@{ratio:g}" if ratio else "reuse")

    async def prepare(self, engine: Engine, trial: Trial) -> None:
        if self._store is not None:
            self._store.make_cold()
        await super().prepare(engine, trial)

    async def ask(self, engine: Engine, trial: Trial) -> Sample:
        recipe = replace(self._recipe, spans=trial.prompt.spans)
        delta = await engine.agenerate(trial.prompt.token_ids, _FIRST_TOKEN, recipe)
        report = check_blended(self.name, delta.report)
        return self.sample(delta, report.recomputed, report.ms)


def check_blended(name: str, report: BlendReport | None) -> BlendReport:
    """Return the report; raises EngineError unless it says that the request was blended, all chunks of it.

    What was prefilled plainly instead has a time and an answer, too, and they are not those of ``name``.
    """
    report = report or BlendReport(fallback="the engine gave no report")
    if report.problem:
        raise EngineError(f"{name} was not blended, so its numbers would mean nothing: {report.problem}")
    return report


def recipe_of(settings: Settings, store: str, ratio: float | None = None) -> Recipe:
    """Return the settings' recipe without spans, over this store. ratio: instead of theirs."""
    options = settings.blending
    return Recipe(store, (), options if ratio is None else replace(options, recompute_ratio=ratio))


def reset(engine: RunningEngine) -> None:
    """Empty the prefix cache; a request that has just ended may hold it for a moment yet."""
    deadline = time.monotonic() + _RESET_TIMEOUT_S
    while not engine.reset_prefix_cache():
        if time.monotonic() > deadline:
            raise EngineError("the prefix cache cannot be emptied: other requests are using this engine")
        time.sleep(0.01)
