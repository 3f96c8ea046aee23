"""The arms of the comparison: ways to the first token of one and the same prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.generation import Sampling
from blendrag.engine.client.running import RunningEngine
from blendrag.engine.wire.prefixes import PrefixPath
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
    """One timed request: what an arm took for the first token of a prompt.

    recomputed: tokens of chunks that were computed, though their KV was known before.
    logprobs: {token id: log probability} of the first token's candidates.
    split_ms: milliseconds of load, select and recompute; none for plain prefill.
    """

    ttft_ms: float
    token: int
    logprobs: dict[int, float]
    recomputed: int
    split_ms: dict[str, float]

    @property
    def fused_ms(self) -> float:
        """Milliseconds that the blend took; the rest is the engine's."""
        return sum(self.split_ms.get(part, 0.0) for part in PARTS)


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt as an arm sends it."""

    token_ids: Sequence[int]
    recipe: Recipe | None = None
    namespace: str = ""
    path: PrefixPath | None = None


def reset(engine: RunningEngine, trial: Trial | None = None) -> None:
    """Empty the prefix cache; a request that has just ended may hold it for a moment yet."""
    deadline = time.monotonic() + _RESET_TIMEOUT_S
    while not engine.reset_prefix_cache():
        if time.monotonic() > deadline:
            raise EngineError("the prefix cache cannot be emptied: other requests are using this engine")
        time.sleep(0.01)


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to the first token; by default plain prefill of the whole prompt. name: its key in the results.
    prepare: done before the clock starts; nothing of earlier requests is left in the prefix cache then."""

    name: str
    trials: Sequence[Trial]
    asked: Callable[[Trial], Asked] = lambda trial: Asked(trial.prompt.token_ids)
    prepare: Callable[[Engine, Trial], None] = reset

    def run(self, engine: Engine, number: int) -> Sample:
        """Prepare a trial, and time its prompt."""
        trial = self.trials[number]
        self.prepare(engine, trial)
        asked = self.asked(trial)
        delta = engine.generate(asked.token_ids, replace(_FIRST_TOKEN, path=asked.path), asked.recipe)
        recomputed, split_ms = trial.prompt.chunk_tokens(delta.prefix_tokens), dict[str, float]()
        if asked.recipe or asked.path:
            report = check_blended(self.name, delta.report)
            recomputed, split_ms = report.recomputed, report.ms
            if asked.path and report.exact != asked.path.held_end:
                raise EngineError(
                    f"{self.name}: {report.exact} of {asked.path.held_end} tokens came from the tree"
                )
        return Sample(1e3 * delta.ttft_s, delta.token_ids[0], delta.logprobs[0], recomputed, split_ms)


def prefix_caching(trials: Sequence[Trial]) -> Arm:
    """Return vLLM's prefix caching, after the same chunks were asked in another order: the common prefix
    hits."""

    def prepare(engine: Engine, trial: Trial) -> None:
        reset(engine)
        if trial.before.token_ids:
            engine.generate(trial.before.token_ids, _FIRST_TOKEN)

    return Arm("prefix", trials, prepare=prepare)


def exact_prefix(trials: Sequence[Trial], tree: ScratchTree, *, cold: bool = False) -> Arm:
    """Return loading of the prompt's own KV up to its question, as full prefill has made it before. cold:
    from disk, instead of RAM."""

    def prepare(engine: Engine, trial: Trial) -> None:
        reset(engine)
        tree.hold(trial.prompt)
        if cold:
            tree.make_cold()
        reset(engine)

    def asked(trial: Trial) -> Asked:
        return Asked(trial.prompt.token_ids, path=tree.path(trial.prompt))

    return Arm("exact cold" if cold else "exact", trials, asked, prepare)


def blended_prefill(
    trials: Sequence[Trial], recipe: Recipe, cold: ScratchStore | None = None, name: str = ""
) -> Arm:
    """Return blended prefill: stored KV, with the recompute ratio of it recomputed. Ratio 0 is full reuse.

    recipe: but for its spans. cold: the store, where that is not RAM; None: as it comes. name: instead of one
    that says the ratio.
    """

    def prepare(engine: Engine, trial: Trial) -> None:
        if cold is not None:
            cold.make_cold()
        reset(engine)

    def asked(trial: Trial) -> Asked:
        return Asked(trial.prompt.token_ids, replace(recipe, spans=trial.prompt.spans))

    ratio = recipe.options.recompute_ratio
    return Arm(name or (f"blend@{ratio:g}" if ratio else "reuse"), trials, asked, prepare)


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
