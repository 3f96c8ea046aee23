"""One attempt at an answer, whoever computes it: what has come of it so far, and what is made of that."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Sequence
from dataclasses import replace

from blendrag.chat.answer import Answer, Piece, TokenLogprob, Usage
from blendrag.chat.calls import Reading, ended_by, visible
from blendrag.chat.request import ChatRequest
from blendrag.engine.client.tool_parser import ToolParser
from blendrag.errors import BlendragError
from blendrag.serving.evidence import Evidence


class Attempt(ABC):
    """One attempt to have a request answered."""

    def __init__(self, request: ChatRequest) -> None:
        self._request, self._begin = request, time.perf_counter()
        self._ttft_s: float | None = None
        self._reasoning, self._text, self._shown = "", "", 0
        self._logprobs: list[TokenLogprob] = []

    @abstractmethod
    def pieces(self) -> Generator[Piece]:
        """Yield the answer as it is generated. Closing the iterator stops the generation."""

    @abstractmethod
    def apieces(self) -> AsyncGenerator[Piece]:
        """Do as ``pieces`` in any event loop."""

    def cancel(self) -> None:  # noqa: B027
        """Stop what was begun, if nobody reads it."""

    def go_on(self, error: BlendragError) -> bool:
        """Have ``pieces`` give the rest of an answer that failed like this when it is next called. Returns
        False if nothing was given out, or the rest would not be right."""
        return False

    def _add(self, text: str, thought: str, logprobs: Sequence[TokenLogprob]) -> None:
        """Note what has come."""
        self._text += text
        self._reasoning += thought
        self._logprobs += logprobs

    def _certain(self, thought: str, parser: ToolParser | None = None) -> Piece:
        """Return the text that is certain by now and was not given out yet."""
        shown = visible(self._text, self._request, parser)
        piece, self._shown = shown[self._shown :], max(self._shown, len(shown))
        return Piece(piece, reasoning=thought)

    def _whole(
        self,
        read: Reading,
        evidence: Evidence,
        *,
        tokens: int,
        stored: int,
        finish_reason: str,
        model: str,
        thought: str = "",
    ) -> Piece:
        """Return the last piece, with the whole answer. tokens: the number of the answer's. stored: tokens of
        the prompt whose KV was put into the store."""
        usage = Usage(
            input=evidence.prompt,
            output=tokens,
            cache_read=evidence.reused + evidence.prefix,
            cache_creation=stored,
            recomputed=evidence.recomputed,
        )
        answer = Answer(
            read.text,
            self._reasoning or None,
            sources=tuple(
                replace(source, attention=evidence.attention.get(source.key))
                for source in self._request.sources
            ),
            finish_reason=ended_by(read, finish_reason),
            ttft_s=self._ttft_s or 0.0,
            total_s=time.perf_counter() - self._begin,
            usage=usage,
            evidence=evidence,
            tool_calls=read.calls,
            invalid_tool_calls=read.invalid,
            logprobs=tuple(self._logprobs),
            model=model,
        )
        return Piece(read.text[self._shown :], answer, thought)
