"""What a chat model gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blendrag.chat.tools import InvalidToolCall, ToolCall
from blendrag.engine.client.generation import Delta
from blendrag.serving.evidence import Evidence


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens.

    cache_read: prompt tokens whose KV came from the store or the prefix cache, as it was. recomputed: those
    that came from the store and were repaired. cache_creation: tokens whose KV this request put into the
    store, because it was found missing or damaged.
    """

    input: int
    output: int
    cache_read: int
    cache_creation: int
    recomputed: int

    @property
    def total(self) -> int:
        return self.input + self.output


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A generated token, its log probability, and the most probable ones in its place."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. Times in seconds; ``ttft_s``: from the engine being asked to the first token.

    finish_reason: "stop", "length" or "tool_calls".
    """

    text: str
    tool_calls: tuple[ToolCall, ...]
    invalid_tool_calls: tuple[InvalidToolCall, ...]
    finish_reason: str
    usage: Usage
    evidence: Evidence
    logprobs: tuple[TokenLogprob, ...]
    ttft_s: float
    total_s: float
    model: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of an answer as it is generated; the last piece has the whole ``completion``."""

    text: str
    completion: Completion | None = None


def token_logprobs(tokenizer: Any, delta: Delta) -> tuple[TokenLogprob, ...]:
    """The log probabilities of a piece, with tokens as text."""
    return tuple(
        TokenLogprob(
            tokenizer.decode([token]),
            at[token],
            tuple((tokenizer.decode([one]), logprob) for one, logprob in _ranked(at)),
        )
        for token, at in zip(delta.token_ids, delta.logprobs, strict=False)
    )


def _ranked(at: dict[int, float]) -> Sequence[tuple[int, float]]:
    return sorted(at.items(), key=lambda pair: -pair[1])
