"""The answer to a request: pieces of text, and the whole with the evidence of what was computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Self

from blendrag.chat.calls import InvalidToolCall, ToolCall
from blendrag.chat.request import Source
from blendrag.engine.client.generation import Delta
from blendrag.serving.evidence import Evidence
from blendrag.text import plain


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request.

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

    @classmethod
    def of(cls, token: str, logprob: float, others: Iterable[tuple[str, float]]) -> Self:
        """Make one of a token and those in its place, in any order."""
        return cls(token, logprob, tuple(sorted(others, key=lambda pair: -pair[1])))


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; ``str(answer)`` is its text.

    reasoning: what the model thought before, as the setting ``reasoning_parser`` finds it; None if nothing.
    sources: the chunks that an index put into the prompt, best first. finish_reason: "stop", "length", or
    "tool_calls" if all calls are valid. Times in seconds; ``ttft_s``: from the engine being asked to the
    first token.
    """

    text: str
    reasoning: str | None
    sources: tuple[Source, ...]
    finish_reason: str
    ttft_s: float
    total_s: float
    usage: Usage
    evidence: Evidence
    tool_calls: tuple[ToolCall, ...]
    invalid_tool_calls: tuple[InvalidToolCall, ...]
    logprobs: tuple[TokenLogprob, ...]
    model: str

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        """Return the text and the prompt's strip, which notebooks show."""
        from blendrag.strip import Strip

        return Strip(self.facts(), self.text).html()

    @property
    def tokens(self) -> int:
        """The number of the answer's tokens."""
        return self.usage.output

    @property
    def named_calls(self) -> tuple[ToolCall, ...]:
        """The calls and, behind them, those of unknown tools, of which an agent tells the model."""
        return (*self.tool_calls, *(one.call for one in self.invalid_tool_calls if one.call))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {**asdict(self), "tokens": self.tokens}

    def facts(self) -> dict[str, Any]:
        """Return the evidence and the times as JSON has them, with rows for documents only."""
        evidence = asdict(self.evidence)
        evidence["documents"] = [row for row in evidence["documents"] if row["kind"] != "fresh"]
        facts: dict[str, Any] = plain({**evidence, "ttft_s": self.ttft_s, "total_s": self.total_s})
        return facts


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of an answer, or of the thinking before it; the last piece has the whole ``answer``."""

    text: str
    answer: Answer | None = None
    reasoning: str = ""


def token_logprobs(tokenizer: Any, delta: Delta) -> tuple[TokenLogprob, ...]:
    """Return the log probabilities of a piece, with tokens as text."""
    return tuple(
        TokenLogprob.of(
            tokenizer.decode([token]),
            at[token],
            ((tokenizer.decode([one]), logprob) for one, logprob in at.items()),
        )
        for token, at in zip(delta.token_ids, delta.logprobs, strict=False)
    )
