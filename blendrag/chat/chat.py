"""``Chat``: a chat model over a library, by default the one that the process shares."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from blendrag.errors import EngineBusyError, EngineClosedError, EngineError, GenerationTimeoutError
from blendrag.models import DEFAULT_MODEL, model_window, resolve_model
from blendrag.serving.lease import Lease
from blendrag.settings import Settings

if TYPE_CHECKING:  # what makes a wrapper object must be quick, and import neither torch nor vLLM
    from blendrag.chat.answer import Answer, Piece
    from blendrag.chat.request import ChatRequest, RequestOptions
    from blendrag.chat.turn import Turn
    from blendrag.prompt import Messages, PromptPlan
    from blendrag.serving.collection import Collection
    from blendrag.serving.library import Library


class Chat:
    """Starts nothing until it is used; then all chats of one configuration share one engine. Thread-safe.

    kv_dir: folder of the texts' KV; by default one per model in the cache folder. library: one that is open,
    and stays its owner's to close. All methods raise BlendragError and nothing else on purpose.
    """

    def __init__(
        self, settings: Settings, kv_dir: Path | None = None, *, library: Library | None = None
    ) -> None:
        self.settings, self.kv_dir, self._lease, self._library = settings, kv_dir, Lease(), library

    @property
    def library(self) -> Library:
        """The texts and their KV, opened if need be: takes a moment the first time."""
        return self._library or self._lease.library(self.settings, self.kv_dir)

    def collection(self, name: str) -> Collection:
        """The documents of one vector store, whose KV is kept. ``name`` tells it from others."""
        from blendrag.serving.collection import Collection

        return Collection(self.library, name)

    def prefetch(self, texts: Iterable[str]) -> None:
        """Begin to read the KV of texts that were found into memory, if the library is open and its engine
        runs. Opens and starts nothing; returns at once."""
        if library := self._library or self._lease.opened(self.settings, self.kv_dir):
            library.prefetch(texts)

    @property
    def tokenizer(self) -> Any:
        return self.library.tokenizer

    @property
    def context_window(self) -> int:
        """Tokens of prompt and answer together; does not start the engine."""
        if self.settings.max_model_len is not None:
            return self.settings.max_model_len
        s = self.settings
        window = model_window(resolve_model(s.model, s.cache_dir, revision=s.revision))
        return window or self.library.start().max_model_len

    def context_window_at_hand(self) -> int | None:
        """``context_window``, if it can be told at once: without unpacking or downloading a model."""
        if self.settings.max_model_len is not None:
            return self.settings.max_model_len
        folder: Path | None = Path(self.settings.model).expanduser()
        if self.settings.model.lower() == DEFAULT_MODEL:
            unpacked = (self.settings.cache_dir / "models").glob(f"{DEFAULT_MODEL}-*/config.json")
            folder = next((config.parent for config in unpacked), None)
        return model_window(folder) if folder and (folder / "config.json").is_file() else None

    def close(self) -> None:
        """End the engine, for all who share it. The next use starts it again. Safe to call twice."""
        self._lease.close()

    # -- generation ---------------------------------------------------------------------------------------

    def request(self, messages: Messages | str, **options: Unpack[RequestOptions]) -> ChatRequest:
        """What to ask: messages, or a rendered prompt. Raises ConfigError for a wrong option."""
        from blendrag.chat.request import make_request

        return make_request(self.settings, messages, options)

    def complete(self, request: ChatRequest) -> Answer:
        """The whole answer."""
        *_, last = self.stream(request)
        assert last.answer is not None, "the last piece has the answer"
        return last.answer

    async def acomplete(self, request: ChatRequest) -> Answer:
        """``complete`` for any event loop. Cancelling it stops the generation."""
        answer: Answer | None = None
        async for piece in self.astream(request):
            answer = piece.answer
        assert answer is not None, "the last piece has the answer"
        return answer

    def stream(self, request: ChatRequest) -> Generator[Piece]:
        """The answer as it is generated. Closing the iterator stops the generation."""
        for left in range(request.max_retries, -1, -1):
            given = False
            try:
                turn = self._turn(request)
                deltas = turn.engine.stream(turn.plan.token_ids, turn.sampling, turn.recipe, turn.namespace)
                with contextlib.closing(deltas):
                    for delta in deltas:
                        given = True
                        yield turn.feed(delta)
                return
            except EngineError as error:
                if given or not left or not _worth_repeating(error):
                    raise

    async def astream(self, request: ChatRequest) -> AsyncGenerator[Piece]:
        """``stream`` for any event loop, which is not blocked."""
        for left in range(request.max_retries, -1, -1):
            given = False
            try:
                turn = await asyncio.to_thread(self._turn, request)
                deltas = turn.engine.astream(turn.plan.token_ids, turn.sampling, turn.recipe, turn.namespace)
                async with contextlib.aclosing(deltas):
                    async for delta in deltas:
                        given = True
                        ends = delta.finish_reason is not None  # may look into the store
                        yield await asyncio.to_thread(turn.feed, delta) if ends else turn.feed(delta)
                return
            except EngineError as error:
                if given or not left or not _worth_repeating(error):
                    raise

    def _turn(self, request: ChatRequest) -> Turn:
        from blendrag.chat.turn import Turn

        return Turn(self.library, self.settings, request)

    # -- about prompts ------------------------------------------------------------------------------------

    def render(self, request: ChatRequest) -> str:
        """The prompt's text, as the model reads it."""
        return self._plan(request).text

    def explain(self, request: ChatRequest) -> list[dict[str, Any]]:
        """What would be reused, without asking: a row per segment of the prompt, then the documents that
        are not in it; each with tokens, tokens reused, and why not more."""
        return self.library.explain(self._plan(request))

    def _plan(self, request: ChatRequest) -> PromptPlan:
        from blendrag.chat.turn import plan_request

        return plan_request(self.library, request)

    def count_tokens(self, request: ChatRequest) -> int:
        """Tokens of the whole prompt, with what the template adds."""
        return len(self._plan(request).token_ids)

    def token_ids(self, text: str) -> list[int]:
        """``text`` in the model's own tokens."""
        from blendrag.prompt import encode_document

        return list(encode_document(self.tokenizer, text))


def _worth_repeating(error: EngineError) -> bool:
    """An engine that died is started again; what the program or the clock has ended stays so."""
    return not isinstance(error, EngineBusyError | EngineClosedError | GenerationTimeoutError)
