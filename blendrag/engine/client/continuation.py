"""The continuation of an answer whose engine died: another engine gets the prompt, and behind it the tokens
that were given out (RAGCache, section 6, fault tolerance)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from blendrag.engine.client.generation import Delta, Sampling

# These of vLLM's other parameters mean the same for the rest of an answer. Penalties and the like do not:
# they look at generated tokens, which are prompt here.
_THE_SAME = {
    "allowed_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
    "min_p",
    "min_tokens",
    "repetition_penalty",  # looks at the prompt's tokens, too
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop_token_ids",
    "top_k",
}


def can_go_on(sampling: Sampling) -> bool:
    """Return whether another engine can finish an answer that one has begun. It cannot where that takes the
    state of a grammar, or of random numbers that the user has fixed."""
    drawn = sampling.seed is not None and sampling.temperature > 0
    return not (sampling.grammar or sampling.forced or drawn or sampling.other.keys() - _THE_SAME)


class Continuation:
    """The rest of one answer. Text of the given tokens that was held back, as it might begin a stop or a
    character, is a part of the rest."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], sampling: Sampling) -> None:
        """Read the given tokens. sampling: the whole answer's, with ``given``."""
        from blendrag.engine.compat.requests import SamplingParams, incremental_detokenizer

        given, other = sampling.given, dict(sampling.other)
        whole = SamplingParams(stop=list(sampling.stop), max_tokens=sampling.max_tokens, **other)
        self._text = incremental_detokenizer(tokenizer, list(prompt), whole)
        for token in given:
            self._text.update([token], False)
        self._text.get_next_output_text(False, True)
        if "min_tokens" in other:
            other["min_tokens"] = max(0, other["min_tokens"] - len(given))
        self.token_ids = [*prompt, *given]
        left = None if sampling.max_tokens is None else sampling.max_tokens - len(given)
        self.sampling = replace(sampling, max_tokens=left, stop=(), other=other, given=())
        """The sampling to ask the engine for. Stops may begin in the given tokens, so they are looked for
        here."""

    def read(self, delta: Delta) -> Delta:
        """Return a piece with its text. It is the last one if a stop has come."""
        before, ended = self._text.num_output_tokens(), delta.finish_reason
        if self._text.update(delta.token_ids, ended == "stop") is not None:
            ended = "stop"
        tokens = self._text.output_token_ids[before:]  # none behind a stop
        return replace(
            delta,
            text=self._text.get_next_output_text(ended is not None, True),
            token_ids=tokens,
            finish_reason=ended,
            logprobs=delta.logprobs[: len(tokens)],
        )
