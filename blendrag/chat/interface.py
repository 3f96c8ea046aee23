"""The interface that classes of frameworks are shells of: messages in, answers out, whoever computes them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Iterable
from typing import TYPE_CHECKING, Any, Unpack

from blendrag.chat.speculation import Speculation, in_thread
from blendrag.errors import BlendragError
from blendrag.settings import Settings

if TYPE_CHECKING:  # what makes a wrapper object must be quick
    from blendrag.chat.answer import Answer, Piece
    from blendrag.chat.attempt import Attempt
    from blendrag.chat.request import ChatRequest, RequestOptions
    from blendrag.prompt import Messages
    from blendrag.serving.collection import KeptDocuments


class ChatModel(ABC):
    """A chat model. Starts nothing until it is used. Thread-safe. All methods raise BlendragError and nothing
    else on purpose.

    settings: the defaults of requests.
    """

    settings: Settings

    @property
    @abstractmethod
    def model_name(self) -> str:
        """The name of the model that answers."""

    @property
    @abstractmethod
    def context_window(self) -> int:
        """The most tokens of prompt and answer together; does not start the engine."""

    @abstractmethod
    def context_window_at_hand(self) -> int | None:
        """Return ``context_window`` if it can be told without unpacking or downloading a model, or asking a
        server; else None."""

    @abstractmethod
    def collection(self, name: str) -> KeptDocuments:
        """Return the collection of one vector store's documents, told from others by its name."""

    @abstractmethod
    def prefetch(self, texts: Iterable[str]) -> None:
        """Begin to read the KV of texts that were found into memory, if the engine runs. Opens and starts
        nothing; returns at once."""

    def order(self, texts: Iterable[str]) -> list[int]:
        """Return the places of texts that were found, in the order in which they go into a prompt (setting
        ``order``). Opens and starts nothing."""
        return [place for place, _ in enumerate(texts)]

    @abstractmethod
    def close(self) -> None:
        """Give back what is held. The next use takes it again. Safe to call twice."""

    # -- generation ---------------------------------------------------------------------------------------

    @abstractmethod
    def request(self, messages: Messages | str, **options: Unpack[RequestOptions]) -> ChatRequest:
        """Make a request of messages, or of a rendered prompt. Raises ConfigError for a wrong option."""

    def complete(self, request: ChatRequest) -> Answer:
        """Return the whole answer."""
        *_, last = self.stream(request)
        assert last.answer is not None, "the last piece has the answer"
        return last.answer

    async def acomplete(self, request: ChatRequest) -> Answer:
        """Do as ``complete`` in any event loop. Cancelling it stops the generation."""
        answer: Answer | None = None
        async for piece in self.astream(request):
            answer = piece.answer
        assert answer is not None, "the last piece has the answer"
        return answer

    def stream(self, request: ChatRequest) -> Generator[Piece]:
        """Yield the answer as it is generated. Closing the iterator stops the generation."""
        attempt: Attempt | None = None
        given = False
        for left in range(request.max_retries, -1, -1):
            try:
                attempt = attempt or self._attempt(request)
                with contextlib.closing(attempt.pieces()) as pieces:
                    for piece in pieces:
                        given = True
                        yield piece
                return
            except BlendragError as error:
                attempt, wait_s = self._next(attempt, error, left, given)
                time.sleep(wait_s)

    async def astream(self, request: ChatRequest) -> AsyncGenerator[Piece]:
        """Do as ``stream`` in any event loop, which is not blocked."""
        attempt: Attempt | None = None
        given = False
        for left in range(request.max_retries, -1, -1):
            try:
                if attempt is None:
                    attempt = await in_thread(lambda: self._attempt(request), lambda late: late.cancel())
                async with contextlib.aclosing(attempt.apieces()) as pieces:
                    async for piece in pieces:
                        given = True
                        yield piece
                return
            except BlendragError as error:
                attempt, wait_s = await asyncio.to_thread(self._next, attempt, error, left, given)
                await asyncio.sleep(wait_s)

    def _next(
        self, failed: Attempt | None, error: BlendragError, left: int, given: bool
    ) -> tuple[Attempt | None, float]:
        """Return the attempt that comes after one that failed like this (None: a new one), and in how many
        seconds; raises the error if there is none. left: attempts that there may still be. given: whether
        any of the answer was given out, so that only its rest may come."""
        wait_s = self._repeated_after(error) if left else None
        if wait_s is None or (given and not (failed and failed.go_on(error))):
            raise error
        return (failed if given else None), wait_s

    def speculate(self, request: ChatRequest) -> Speculation:
        """Say what will be asked soon, if nothing changes: its answer is begun, and kept back, if the engine
        has nothing to do and such prompts have come often enough to pay. Asking exactly this adopts it.
        Ended by the next call of this, unless that says the same, and by anything else that is asked.

        Starts no engine; what is wrong with the request, who asks is told. A server begins nothing.
        """
        return Speculation(request)

    async def aspeculate(self, request: ChatRequest) -> Speculation:
        """Do as ``speculate`` in any event loop, which is not blocked."""
        return await in_thread(lambda: self.speculate(request), Speculation.end)

    @abstractmethod
    def _attempt(self, request: ChatRequest) -> Attempt:
        """Return a new attempt. May take as long as an engine to start."""

    @abstractmethod
    def _repeated_after(self, error: BlendragError) -> float | None:
        """Return in how many seconds to try again after an attempt that failed like this; None: never."""

    # -- about prompts ------------------------------------------------------------------------------------

    @abstractmethod
    def render(self, request: ChatRequest) -> str:
        """Return the prompt's text, as the model reads it."""

    @abstractmethod
    def explain(self, request: ChatRequest) -> list[dict[str, Any]]:
        """Return what would be reused, without asking: a row per segment of the prompt, then the documents
        that are not in it; each with tokens, tokens reused, and why not more."""

    @abstractmethod
    def count_tokens(self, request: ChatRequest) -> int:
        """Return how many tokens the whole prompt has, with what the template adds."""

    @abstractmethod
    def token_ids(self, text: str) -> list[int]:
        """Return ``text`` in the model's own tokens."""
