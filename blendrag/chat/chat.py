"""``Chat``: a chat model over a library, by default the one that the process shares."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from blendrag.chat.interface import ChatModel
from blendrag.chat.speculation import Speculation, Speculations
from blendrag.errors import (
    BlendragError,
    EngineBusyError,
    EngineClosedError,
    EngineError,
    EngineStartError,
    GenerationTimeoutError,
)
from blendrag.models import DEFAULT_MODEL, model_window, resolve_model
from blendrag.serving.lease import Lease
from blendrag.settings import Settings
from blendrag.text import encodable

if TYPE_CHECKING:  # what makes a wrapper object must be quick, and import neither torch nor vLLM
    from blendrag.chat.request import ChatRequest, RequestOptions
    from blendrag.chat.turn import Turn
    from blendrag.prompt import Messages, PromptPlan
    from blendrag.serving.collection import Collection
    from blendrag.serving.library import Library


class Chat(ChatModel):
    """A chat model on an engine. Starts nothing until it is used; then all chats of one configuration share
    one engine.

    kv_dir: folder of the texts' KV; by default one per model in the cache folder. library: one that is open,
    and stays its owner's to close.
    """

    def __init__(
        self, settings: Settings, kv_dir: Path | None = None, *, library: Library | None = None
    ) -> None:
        self.settings, self.kv_dir, self._lease, self._library = settings, kv_dir, Lease(), library
        self._speculations = Speculations()

    @property
    def library(self) -> Library:
        """The texts and their KV, opened if need be: takes a moment the first time."""
        return self._library or self._lease.library(self.settings, self.kv_dir)

    @property
    def _opened(self) -> Library | None:
        return self._library or self._lease.opened(self.settings, self.kv_dir)

    def collection(self, name: str) -> Collection:
        from blendrag.serving.collection import Collection

        return Collection(self.library, name)

    def prefetch(self, texts: Iterable[str]) -> None:
        if library := self._opened:
            library.prefetch(map(encodable, texts))

    def order(self, texts: Iterable[str]) -> list[int]:
        if self.settings.documents_first and (library := self._opened):
            return library.order(map(encodable, texts))
        return super().order(texts)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.library.tokenizer

    @property
    def model_name(self) -> str:
        return self.settings.model

    @property
    def context_window(self) -> int:
        s = self.settings
        if s.max_model_len is not None:
            return s.max_model_len
        window = model_window(resolve_model(s.model, s.cache_dir, revision=s.revision))
        return window or self.library.start().max_model_len

    def context_window_at_hand(self) -> int | None:
        if self.settings.max_model_len is not None:
            return self.settings.max_model_len
        folder: Path | None = Path(self.settings.model).expanduser()
        if self.settings.model.lower() == DEFAULT_MODEL:
            unpacked = (self.settings.cache_dir / "models").glob(f"{DEFAULT_MODEL}-*/config.json")
            folder = next((config.parent for config in unpacked), None)
        return model_window(folder) if folder and (folder / "config.json").is_file() else None

    def close(self) -> None:
        """End the engine, for all who share it. The next use starts it again. Safe to call twice."""
        self._speculations.end()
        self._lease.close()

    def request(self, messages: Messages | str, **options: Unpack[RequestOptions]) -> ChatRequest:
        from blendrag.chat.request import check_variables, make_request

        request = make_request(self.settings, messages, options)
        check_variables(request.chat_template_kwargs)
        return request

    def speculate(self, request: ChatRequest) -> Speculation:
        def begin(request: ChatRequest, freed: bool) -> Turn | None:
            library = self._opened
            if library is None or not (freed or library.session.idle):
                return None
            turn = self._turn(request)
            turn.begin()
            return turn

        return self._speculations.expect(request, begin)

    def _attempt(self, request: ChatRequest) -> Turn:
        return self._speculations.turn(request, self._turn)

    def _repeated_after(self, error: BlendragError) -> float | None:
        """Return in how many seconds to ask again: an engine that died is started again; one that does not
        start would not, and what the program or the clock has ended stays so. None: never."""
        final = EngineStartError | EngineBusyError | EngineClosedError | GenerationTimeoutError
        return 0.0 if isinstance(error, EngineError) and not isinstance(error, final) else None

    def _turn(self, request: ChatRequest) -> Turn:
        library = self.library  # says what is not installed, if anything
        from blendrag.chat.turn import Turn

        return Turn(library, self.settings, request)

    def render(self, request: ChatRequest) -> str:
        return self._plan(request).text

    def explain(self, request: ChatRequest) -> list[dict[str, Any]]:
        return self.library.explain(self._plan(request))

    def _plan(self, request: ChatRequest) -> PromptPlan:
        library = self.library
        from blendrag.chat.turn import plan_request

        return plan_request(library, request)

    def count_tokens(self, request: ChatRequest) -> int:
        return len(self._plan(request).token_ids)

    def token_ids(self, text: str) -> list[int]:
        from blendrag.prompt import encode_document

        return list(encode_document(self.tokenizer, encodable(text)))
