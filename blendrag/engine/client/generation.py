"""The parameters of a generation, and the pieces that come back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from blendrag.engine.client.prior_turns import PriorTurns
from blendrag.engine.wire.prefixes import PrefixPath
from blendrag.engine.wire.recipe import FIELD, Recipe
from blendrag.engine.wire.report import BlendReport
from blendrag.errors import ConfigError

FORCED = "blendrag_forced"  # in ``SamplingParams.extra_args``: the token ids to generate, first to last


@dataclass(frozen=True, slots=True)
class Grammar:
    """The constraint that a completion has to match. kind, value: as vLLM takes them: ``json`` a schema,
    ``json_object`` True, ``regex`` and ``grammar`` (EBNF) text, ``choice`` texts, ``structural_tag`` JSON."""

    kind: Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
    value: Any


@dataclass(frozen=True, slots=True)
class Sampling:
    """The parameters of one completion.

    max_tokens: the completion's longest length; None: the rest of the window. logprobs: number of top log
    probabilities wanted per token. timeout_s: seconds the whole generation may take. grammar: what the text
    has to match. forced: tokens that an engine of the laboratory has to generate, whatever the limit and
    stops; ``Delta.logprobs`` has their log probabilities, which are the model's own. thinks_first:
    ``chat_template_kwargs`` of the prompt, if the model thinks before the grammar holds; None: it holds from
    the first token. path: the prompt's path in a tree of exact prefixes, if it is not blended. given: tokens
    of the answer that an engine gave out before it died; another goes on behind them. other: further
    parameters of vLLM's ``SamplingParams``.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    timeout_s: float | None = None
    grammar: Grammar | None = None
    forced: tuple[int, ...] = ()
    thinks_first: Mapping[str, Any] | None = None
    path: PrefixPath | None = None
    given: tuple[int, ...] = ()
    other: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Delta:
    """A piece of a completion as it is generated. The last one carries ``finish_reason`` and ``report``.

    ttft_s: seconds from the request to its first token.
    prefix_tokens: prompt tokens that were not computed by the engine itself (blended or prefix-cached).
    report: what became of the prompt's blend; None if the engine has said nothing.
    logprobs: per token, {token id: log probability}.
    """

    text: str
    token_ids: list[int]
    ttft_s: float
    finish_reason: str | None = None
    prefix_tokens: int = 0
    report: BlendReport | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)

    def joined(self, later: Delta) -> Delta:
        """Return this piece and the one after it as one."""
        return replace(
            later,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
        )


def vllm_prompt(
    token_ids: list[int], recipe: Recipe | None, turns: PriorTurns, namespace: str = ""
) -> dict[str, Any]:
    """Return the token ids as vLLM takes them, with a salt if their KV will not be exact, or belongs to a
    namespace."""
    salt = f"{namespace}:" if namespace else ""
    if recipe is not None:
        salt = turns.salt(namespace, recipe, token_ids)
    return {"prompt_token_ids": token_ids} | ({"cache_salt": salt} if salt else {})


def vllm_sampling(sampling: Sampling, room: int, recipe: Recipe | None, ticket: str) -> Any:
    """Return ``SamplingParams`` that stream, stop within ``room`` tokens, and carry the recipe to the
    connector.

    Raises ConfigError for a parameter that vLLM does not know or a value that it refuses.
    """
    from blendrag.engine.compat.requests import (
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
        VLLMClientError,
        check_readable,
    )

    if sampling.other.get("n", 1) != 1:
        raise ConfigError("one answer to a request: ask several times for several (n)")
    grammar, forced = sampling.grammar, list(sampling.forced)
    logprobs, other = sampling.logprobs, sampling.other
    extra: dict[str, Any] = {}
    if (what := recipe or sampling.path) is not None:
        extra["kv_transfer_params"] = what.transfer_params(ticket)
    if forced:
        extra[FORCED], logprobs, other = forced, logprobs or 0, {**other, "ignore_eos": True}
    try:
        extra = {**(other.get("extra_args") or {}), **extra}
        if other.get("logit_bias"):
            other = {**other, "logit_bias": {int(token): bias for token, bias in other["logit_bias"].items()}}
        params = SamplingParams(
            max_tokens=min(len(forced) or sampling.max_tokens or room, room),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop=[] if forced else list(sampling.stop),
            seed=sampling.seed,
            logprobs=logprobs,
            structured_outputs=grammar and StructuredOutputsParams(**{grammar.kind: grammar.value}),
            output_kind=RequestOutputKind.DELTA,
            **{**other, "extra_args": extra or None},
        )
        check_readable(params)
        return params
    except (AttributeError, TypeError, ValueError, VLLMClientError) as error:
        raise ConfigError(f"vLLM refuses these sampling parameters: {error}") from error


def vllm_reasoning(sampling: Sampling) -> dict[str, Any]:
    """Return the arguments that tell ``AsyncLLM.generate`` whether the model thinks before an answer that has
    to match a grammar."""
    if sampling.thinks_first is None:
        return {"reasoning_ended": True}
    of_template = {"chat_template_kwargs": dict(sampling.thinks_first)}
    return {"reasoning_ended": False, "reasoning_parser_kwargs": of_template}


def delta_of(output: Any, ttft_s: float, prefix_tokens: int) -> Delta:
    """Return a vLLM ``RequestOutput`` as a piece."""
    piece, params = output.outputs[0], output.kv_transfer_params or {}
    return Delta(
        text=piece.text,
        token_ids=list(piece.token_ids),
        ttft_s=ttft_s,
        finish_reason=piece.finish_reason,
        prefix_tokens=prefix_tokens,
        report=BlendReport.from_plain(params.get(FIELD)) if output.finished else None,
        logprobs=[{i: lp.logprob for i, lp in at.items()} for at in piece.logprobs or ()],
    )
