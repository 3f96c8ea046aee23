"""One prompt put to the engine: the right answer forced, the free answer, a decision."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.generation import Delta, Sampling
from blendrag.engine.wire.recipe import Recipe
from blendrag.engine.wire.report import BlendReport
from blendrag.errors import EngineError
from blendrag.lab.arms import TOP, check_blended
from blendrag.store.contexts import Ids


@dataclass(frozen=True, slots=True)
class ArmPrompt:
    """A prompt as the arm of this name asks it. Arms are apart in the prefix cache; an arm's later requests
    find its own KV there, blended as it is, up to the last block.

    recipe: how stored KV is blended; None: plain prefill.
    """

    arm: str
    token_ids: Ids
    recipe: Recipe | None = None


@dataclass(frozen=True, slots=True)
class ForcedAnswer:
    """An answer that was forced. each: -log p of every forced token, in nats. logprobs: per token {token id:
    log probability} of the likeliest. report: of the blend."""

    each: list[float]
    logprobs: list[dict[int, float]]
    ttft_ms: float
    report: BlendReport

    @property
    def nll(self) -> float:
        return float(np.mean(self.each))

    @property
    def nll_later(self) -> float | None:
        """The mean of ``each`` from the second token on; None where there is none."""
        return float(np.mean(self.each[1:])) if len(self.each) > 1 else None


async def force(engine: Engine, prompt: ArmPrompt, answer: Ids, again: bool = False) -> ForcedAnswer:
    """Measure how likely ``answer`` is. again: whether the prompt has been asked before.

    Raises EngineError if the prompt was not blended though it should be.
    """
    delta = await _generate(engine, prompt, Sampling(forced=answer, logprobs=TOP), again)
    if tuple(delta.token_ids) != answer:
        raise EngineError(f"{prompt.arm}: the engine did not generate the answer that was forced")
    each = [-at[token] for at, token in zip(delta.logprobs, answer, strict=True)]
    return ForcedAnswer(each, delta.logprobs, 1e3 * delta.ttft_s, delta.report or BlendReport())


async def write(engine: Engine, prompt: ArmPrompt, max_tokens: int) -> str:
    """Return the model's own answer, greedily, to a prompt that has been asked before."""
    return (await _generate(engine, prompt, Sampling(max_tokens=max_tokens), again=True)).text


async def go_on(engine: Engine, prompt: ArmPrompt, tokens: int) -> Ids:
    """Return the first ``tokens`` that the model itself writes, greedily and beyond its answer's end."""
    endless = Sampling(max_tokens=tokens, other={"ignore_eos": True})
    return tuple((await _generate(engine, prompt, endless, again=True)).token_ids)


async def decide(engine: Engine, prompt: ArmPrompt, choices: Mapping[str, Ids]) -> str | None:
    """Return the likeliest of ``choices`` per token, to a prompt that has been asked before; None without
    any."""
    forced = await asyncio.gather(*(force(engine, prompt, ids, again=True) for ids in choices.values()))
    return min(zip(choices, forced, strict=True), key=lambda pair: pair[1].nll)[0] if choices else None


async def _generate(engine: Engine, prompt: ArmPrompt, sampling: Sampling, again: bool) -> Delta:
    """Generate an answer. again: its blended KV may be in the prefix cache, and then there is nothing to
    report."""
    delta = await engine.agenerate(prompt.token_ids, sampling, prompt.recipe, prompt.arm)
    found = again and delta.prefix_tokens and delta.report is None
    if prompt.recipe is not None and not found:
        check_blended(prompt.arm, delta.report)
    return delta
