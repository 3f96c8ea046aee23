"""Timed requests: what profiles, and checks of their estimates, are measured with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.generation import Sampling
from blendrag.errors import EngineError
from blendrag.lab.arms import check_blended, recipe_of, reset
from blendrag.lab.progress import BenchProgress
from blendrag.lab.prompts import Prompt
from blendrag.lab.trial_store import TrialStore
from blendrag.settings import Settings

FIRST_TOKEN = Sampling(max_tokens=1)

# A run's seconds: to the first token, and of these, of the fused prefill (0 without one).
Times = tuple[float, float]
Run = Callable[[], Times]
K = TypeVar("K", bound=Hashable)


def interleaved(
    runs: Mapping[K, Run], repeats: int, progress: BenchProgress, what: str
) -> dict[K, list[Times]]:
    """All runs in turn, in rounds, each beginning with another one, after a round of warm-up."""
    found: dict[K, list[Times]] = {key: [] for key in runs}
    keys = list(runs)
    for number in range(repeats + 1):
        progress.note(f"{what}: round {number} of {repeats}" if number else f"{what}: warm-up")
        shift = number * len(keys) // (repeats + 1)
        for key in (*keys[shift:], *keys[:shift]):
            times = runs[key]()
            if number:
                found[key].append(times)
            progress.step()
    return found


def prefill_run(engine: Engine, ids: Sequence[int], cached: int = 0) -> Run:
    """Plain prefill of ``ids``, the first ``cached`` of which are in the prefix cache: whole blocks."""

    def run() -> Times:
        reset(engine)
        if cached:
            engine.generate(ids[:cached], FIRST_TOKEN)
        delta = engine.generate(ids, FIRST_TOKEN)
        if delta.prefix_tokens != cached:
            raise EngineError(f"of {cached} cached tokens the prefix cache had {delta.prefix_tokens}")
        return delta.ttft_s, 0.0

    return run


def blend_run(engine: Engine, settings: Settings, store: TrialStore, prompt: Prompt, ratio: float) -> Run:
    """The prompt, blended, from a cold disk if that is where it is. Raises EngineError if it was prefilled
    plainly instead."""
    recipe = replace(recipe_of(settings, store.id, ratio), spans=prompt.spans)

    def run() -> Times:
        reset(engine)
        store.make_cold()
        delta = engine.generate(prompt.token_ids, FIRST_TOKEN, recipe)
        return delta.ttft_s, sum(check_blended("a prompt", delta.report).ms.values()) / 1e3

    return run
