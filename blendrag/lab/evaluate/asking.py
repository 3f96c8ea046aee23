"""One prompt put to the engine: the right answer forced, the free answer, a decision."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.generation import Delta, Sampling
from blendrag.engine.recipe import Recipe
from blendrag.engine.report import BlendReport
from blendrag.errors import EngineError
from blendrag.lab.arms import TOP, check_blended

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt as the arm of this name asks it. Arms are apart in the prefix cache; an arm's later requests
    find its own KV there, blended as it is, up to the last block.

    recipe: how stored KV is blended; None: plain prefill.
    spent_ms: what it took to arrive at this prompt; answer: the free answer, where that has told it already.
    """

    arm: str
    token_ids: Ids
    recipe: Recipe | None = None
    spent_ms: float = 0.0
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Forced:
    """nll: mean over the forced tokens, in nats. first_token, logprobs: what the model itself would begin
    with, and {token id: log probability} of its likeliest. ttft_ms: what was spent before is part of it.
    """

    nll: float
    tokens: int
    first_token: int
    logprobs: dict[int, float]
    ttft_ms: float
    report: BlendReport


async def force(engine: Engine, request: Request, answer: Ids, again: bool = False) -> Forced:
    """How likely ``answer`` is. again: whether the request has been made before.

    Raises EngineError if the prompt was not blended though it should be.
    """
    delta = await _generate(engine, request, Sampling(forced=answer, logprobs=TOP), again)
    if tuple(delta.token_ids) != answer:
        raise EngineError(f"{request.arm}: the engine did not generate the answer that was forced")
    of_answer = [at[token] for at, token in zip(delta.logprobs, answer, strict=True)]
    ranked = sorted(delta.logprobs[0].items(), key=lambda item: -item[1])[:TOP]
    first_ms = 0.0 if request.answer is not None else 1e3 * delta.ttft_s
    return Forced(
        -sum(of_answer) / len(answer),
        len(answer),
        ranked[0][0],
        dict(ranked),
        request.spent_ms + first_ms,
        delta.report or BlendReport(),
    )


async def write(engine: Engine, request: Request, max_tokens: int) -> str:
    """The model's own answer, greedily, to a request that has been made before."""
    if request.answer is not None:
        return request.answer
    return (await _generate(engine, request, Sampling(max_tokens=max_tokens), again=True)).text


async def decide(engine: Engine, request: Request, choices: Mapping[str, Ids]) -> str | None:
    """The likeliest of ``choices`` per token, to a request that has been made before; None without any."""
    forced = await asyncio.gather(*(force(engine, request, ids, again=True) for ids in choices.values()))
    return min(zip(choices, forced, strict=True), key=lambda pair: pair[1].nll)[0] if choices else None


async def _generate(engine: Engine, request: Request, sampling: Sampling, again: bool) -> Delta:
    """``again``: its blended KV may be in the prefix cache, and then there is nothing to report."""
    delta = await engine.agenerate(request.token_ids, sampling, request.recipe, request.arm)
    found = again and delta.prefix_tokens and delta.report is None
    if request.recipe is not None and not found:
        check_blended(request.arm, delta.report)
    return delta
