"""Documents into an index, and questions to it, whoever computes the answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, Unpack

from blendrag.chat.answer import Answer, Piece
from blendrag.chat.interface import ChatModel
from blendrag.chat.request import ChatRequest, RequestOptions, Source, check_names
from blendrag.embedder import Embedder
from blendrag.errors import ConfigError, EmptyIndexError, PromptTooLongError
from blendrag.index.ingest import DocumentPipeline, IngestReport
from blendrag.index.ledger import Ledger
from blendrag.index.loaders import Item
from blendrag.index.vectors import VectorStore
from blendrag.models import resolve_embedder
from blendrag.progress import Progress, progress_bar
from blendrag.prompt import Messages
from blendrag.settings import Settings

_MIN_ANSWER_TOKENS = 32  # an answer worth reading: the window must leave room for it


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

    def __init__(self, root: Path, settings: Settings) -> None:
        self.root, self.settings = root, settings
        embedder = Embedder(resolve_embedder(settings.embedder), name=settings.embedder)
        self._ledger, self._vectors = Ledger(root), VectorStore(root, embedder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder, and give back what is held. Safe to call twice."""
        self._ledger.close()
        self._vectors.close()

    def stats(self) -> dict[str, Any]:
        """Return how many documents there are."""
        return {"documents": len(self._ledger.sources())}

    # -- documents ----------------------------------------------------------------------------------------

    def ingest(self, items: Item | Iterable[Item], *, progress: bool | None = None) -> IngestReport:
        """Make the index hold ``items``: paths, folders, texts, or documents.

        Unchanged documents are skipped, changed ones replaced. Removed is what a given folder has no more,
        and what a list of documents has no more of a source that it names. May be interrupted and repeated.
        ``progress``: show a bar; None: if someone is watching.
        Raises SourceError for a wrong path, StoreFullError when the disk is full.
        """
        begin, report = time.perf_counter(), IngestReport()
        with progress_bar(progress) as bar:
            self._keep(self._pipeline().take(items, report, bar), report, bar)
        report.total_s = time.perf_counter() - begin
        return report

    @abstractmethod
    def _pipeline(self) -> DocumentPipeline:
        """Return what takes documents into this index."""

    @abstractmethod
    def _keep(self, orphans: list[str], report: IngestReport, bar: Progress) -> None:
        """Have the KV of exactly the documents that the index holds now. orphans: keys whose KV can go."""

    # -- questions ----------------------------------------------------------------------------------------

    def retrieve(self, question: str, similarity_top_k: int | None = None) -> list[Source]:
        """Return the chunks most like the question, best first. Raises EmptyIndexError for no documents."""
        wanted = self.settings.similarity_top_k if similarity_top_k is None else similarity_top_k
        if not isinstance(wanted, int) or wanted < 1:
            raise ConfigError(f"similarity_top_k has to be a whole number of at least 1, not {wanted!r}")
        found = self._vectors.search(question, wanted)
        if not found:
            raise EmptyIndexError("the index holds no documents: ingest some first")
        return found

    def _request(self, prompt: str | Messages, options: AskOptions) -> ChatRequest:
        """Make a request of a prompt: a question gets what is retrieved for it, as far as that fits the
        window; messages are a prompt already."""
        check_names(options, AskOptions.__annotations__)
        asked: Any = dict(options)
        similarity_top_k, history = asked.pop("similarity_top_k", None), asked.pop("history", None) or ()
        if not isinstance(prompt, str):
            return self._chat.request(prompt, **asked)
        if not prompt.strip():
            raise ConfigError("the question is empty")
        messages = [*history, {"role": "user", "content": prompt}] if history else prompt
        request = self._chat.request(messages, **asked)  # a wrong option is said before anything is searched
        found, left_out = self.retrieve(prompt, similarity_top_k), list[Source]()
        window = self._window
        while found:
            one = replace(self._asking(request, found, left_out), sources=tuple(found))
            with contextlib.suppress(PromptTooLongError):
                room = window - self._chat.count_tokens(one)
                if room >= _MIN_ANSWER_TOKENS:
                    return one.within(room)  # servers refuse to be asked for more
            left_out.append(found.pop())
        raise PromptTooLongError(
            f"the question leaves no room for a document in the model's window of {window} tokens"
        )

    @property
    def _window(self) -> int:
        """The most tokens of prompt and answer together."""
        return self._chat.context_window

    @abstractmethod
    def _asking(
        self, request: ChatRequest, found: Sequence[Source], left_out: Sequence[Source]
    ) -> ChatRequest:
        """Return the request with documents before its question. left_out: of those found, too long."""

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


def history_and_question(request: ChatRequest) -> tuple[Messages, str]:
    """Return the earlier messages of a question's request, and the question."""
    if isinstance(request.messages, str):
        return (), request.messages
    *history, last = request.messages
    return history, last["content"]
