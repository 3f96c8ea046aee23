"""Questions to an index, whoever computes the answers."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Iterator
from typing import Any, Unpack

from blendrag.chat.answer import Answer, Piece
from blendrag.chat.interface import ChatModel
from blendrag.chat.request import ChatRequest, RequestOptions
from blendrag.prompt import Messages

LEAST_ANSWER_TOKENS = 32  # an answer worth reading: the window must leave room for it


class AskOptions(RequestOptions, total=False):
    """Options of a question: those of any request; ``similarity_top_k``, chunks retrieved; and ``history``,
    earlier messages."""

    similarity_top_k: int | None
    history: Messages


class AnswerStream:
    """Pieces of an answer's text as they are generated; afterwards ``answer`` holds the whole. ``pieces`` has
    the thinking, too."""

    def __init__(self, pieces: Generator[Piece]) -> None:
        self._pieces = pieces
        self.answer: Answer | None = None

    def __iter__(self) -> Iterator[str]:
        return (piece.text for piece in self.pieces() if piece.text)

    def pieces(self) -> Iterator[Piece]:
        """Yield the answer as :class:`Piece`, thinking included."""
        for piece in self._pieces:
            self.answer = piece.answer
            yield piece

    def close(self) -> None:
        """Stop generating."""
        self._pieces.close()


class Answering(ABC):
    """An index that can be asked. A prompt is a question (a string), answered from the documents most like
    it; or messages, ``{"role": ..., "content": ...}``, in which ingested texts are recognised by content."""

    _chat: ChatModel

    @abstractmethod
    def _request(self, prompt: str | Messages, options: AskOptions) -> ChatRequest:
        """Make a request of a prompt: a question gets what is retrieved for it; messages are a prompt
        already."""

    def explain(self, prompt: str | Messages, **options: Unpack[AskOptions]) -> list[dict[str, Any]]:
        """Return what would be reused, without asking: a row per segment of the prompt, then the documents
        that are not in it; each with tokens, tokens reused, and why not more."""
        return self._chat.explain(self._request(prompt, options))

    def ask(self, prompt: str | Messages, **options: Unpack[AskOptions]) -> Answer:
        """Answer a prompt. Raises EmptyIndexError, PromptTooLongError, ConfigError for a wrong option."""
        return self._chat.complete(self._request(prompt, options))

    def stream(self, prompt: str | Messages, **options: Unpack[AskOptions]) -> AnswerStream:
        """Do as ``ask``, piece by piece. Closing the stream stops the generation."""

        def pieces() -> Generator[Piece]:  # retrieves when it is read, as it generates
            yield from self._chat.stream(self._request(prompt, options))

        return AnswerStream(pieces())

    async def aask(self, prompt: str | Messages, **options: Unpack[AskOptions]) -> Answer:
        """Do as ``ask`` in an event loop, which is not blocked. Cancelling it stops the generation."""
        return await self._chat.acomplete(await asyncio.to_thread(self._request, prompt, options))

    async def astream(
        self, prompt: str | Messages, **options: Unpack[AskOptions]
    ) -> AsyncGenerator[str | Answer]:
        """Yield pieces of text, and at the end the :class:`Answer`."""
        request = await asyncio.to_thread(self._request, prompt, options)
        async with contextlib.aclosing(self._chat.astream(request)) as pieces:
            async for piece in pieces:
                if piece.text:
                    yield piece.text
                if piece.answer is not None:
                    yield piece.answer
