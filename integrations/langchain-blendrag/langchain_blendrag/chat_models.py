"""``ChatBlend``: a LangChain chat model that answers from documents without prefilling them again."""

from __future__ import annotations

import contextlib
import difflib
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr, field_serializer, model_validator

from blendrag import ChatModel, Settings, open_chat, without_password
from blendrag.errors import BlendragWarning
from langchain_blendrag import _convert
from langchain_blendrag._conversation import InConversation, with_conversation
from langchain_blendrag._request import chat_request
from langchain_blendrag._tools import bound_tools, structured

if TYPE_CHECKING:  # imports torch
    from blendrag import ChatRequest, Speculation

# Fields that are settings of blendrag's under the same name; and those that are options of a call only.
_SETTINGS = ("model", "revision", "temperature", "max_tokens", "blend", "recompute_ratio", "selector")
_PER_CALL = (
    "top_p", "stop", "seed", "timeout", "max_retries", "logprobs", "top_logprobs", "model_kwargs"
)  # fmt: skip

Tool = Mapping[str, Any] | type | Callable[..., Any] | BaseTool


class ChatBlend(InConversation):
    """Chat model on an embedded vLLM engine, or on a server; the documents in a prompt are blended, not
    prefilled.

    Texts that a ``BlendChroma``, or another vector store made with ``warm``, holds are recognised in any
    prompt; their stored KV is used. Everything else is read as usual.

    Making one starts nothing: the engine starts with the first use and is shared by all objects of the same
    configuration; ``close()`` ends it. Settings of blendrag that are no fields here (``kv_cache_gib=4``) may
    be given as well. With ``base_url``, model, texts and their KV are those of a server (``blendrag serve``),
    and no engine is started here.

    Example:
        ```python
        llm = ChatBlend()  # model="...": a folder or a hub id; without one, a small packaged model
        llm.invoke("Why is the sky blue?").text
        ```
    """

    model_config = ConfigDict(populate_by_name=True)

    base_url: str | None = None
    """Of a server, such as ``http://localhost:8000``, whose engine answers."""
    api_key: SecretStr | None = None
    """For the server; by default the variable ``BLENDRAG__API_KEY``."""
    model: str = Field(
        default_factory=lambda given: "" if given.get("base_url") else Settings.load().model,
        alias="model_name",
    )
    """Packaged default, a local folder, or a hub id. Of a server, by default the one that it serves."""
    revision: str | None = None
    """Revision on the hub."""
    temperature: float | None = None
    """0 (the default) always takes the most probable token."""
    max_tokens: int | None = None
    """Most tokens of an answer."""
    top_p: float | None = None
    stop: list[str] | None = None
    """Texts that end an answer; they are not part of it."""
    seed: int | None = None
    timeout: float | None = None
    """Seconds that an answer may take."""
    max_retries: int = 1
    """How often a request is sent again after the engine failed."""
    logprobs: bool = False
    top_logprobs: int | None = None
    """Most probable tokens whose log probabilities are given for each place."""
    streaming: bool = False
    blend: bool | None = None
    """False prefills every prompt plainly, on the same engine."""
    recompute_ratio: float | None = None
    """Share of the documents' tokens that is recomputed."""
    selector: str | None = None
    """How those tokens are chosen."""
    kv_dir: Path | None = None
    """Folder of the documents' KV; by default one per model in the cache folder."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """More of vLLM's sampling parameters, such as ``repetition_penalty``."""
    more_settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of blendrag's that are no fields here; given as arguments of their own, or as this."""

    _chat: ChatModel | None = PrivateAttr(default=None)
    _chat_made_of: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather_settings(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if "max_completion_tokens" in values:  # ChatOpenAI's other name for it
            values = {**values, "max_tokens": values["max_completion_tokens"]}
        fields = {*cls.model_fields, "model_name"}
        ours = {*Settings.model_fields, "mode"} - fields  # mode: Settings say what it is called now
        given = {name: value for name, value in values.items() if name in fields}
        more = {**values.get("settings", {}), **{name: values[name] for name in values if name in ours}}
        # LangChain passes names of other providers: no error
        for name in values.keys() - fields - ours - {"settings", "max_completion_tokens"}:
            if close := difflib.get_close_matches(name, [*fields, *ours], n=1, cutoff=0.8):
                warnings.warn(f"ignored {name!r}; did you mean {close[0]!r}?", BlendragWarning, stacklevel=2)
        return given | {"more_settings": {**given.get("more_settings", {}), **more}}

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        _ = self.chat  # a wrong value is said now, not with the first question
        return self

    @field_serializer("base_url")
    def _without_password(self, url: str | None) -> str | None:
        return without_password(url) if url else url

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, self._without_password(value) if name == "base_url" else value

    @property
    def settings(self) -> Settings:
        """What the engine is started with, and the defaults of requests."""
        return self.chat.settings

    @property
    def chat(self) -> ChatModel:
        """The framework-free chat under this one."""
        made_of = self.model_dump(include={*_SETTINGS, "more_settings", "kv_dir", "api_key"})
        made_of["base_url"] = self.base_url
        if self._chat is None or self._chat_made_of != made_of:
            ours = {name: getattr(self, name) for name in _SETTINGS}
            given = {**self.more_settings, **ours, "model": self.model or None}
            key = self.api_key.get_secret_value() if self.api_key else None
            self._chat = open_chat(given, self.kv_dir, self.base_url, key)
            self._chat_made_of = made_of
        return self._chat

    # -- generation ---------------------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return _convert.chat_result(self.chat.complete(self._request(messages, stop, kwargs)))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return _convert.chat_result(await self.chat.acomplete(self._request(messages, stop, kwargs)))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        pieces = self.chat.stream(self._request(messages, stop, kwargs))
        with contextlib.closing(pieces):
            for piece in pieces:
                if piece.text or piece.reasoning or piece.answer:
                    yield _convert.chat_chunk(piece)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        pieces = self.chat.astream(self._request(messages, stop, kwargs))
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                if piece.text or piece.reasoning or piece.answer:
                    yield _convert.chat_chunk(piece)

    def speculate(self, input: LanguageModelInput, **kwargs: Any) -> Speculation:
        """Say what will be asked soon, if nothing changes: its answer may be begun, and kept back. Asking
        exactly this adopts it; anything else, or ``end()`` of what is returned, ends it."""
        return self.chat.speculate(self._request_of(input, with_conversation(None, kwargs)))

    async def aspeculate(self, input: LanguageModelInput, **kwargs: Any) -> Speculation:
        """``speculate`` for an event loop."""
        return await self.chat.aspeculate(self._request_of(input, with_conversation(None, kwargs)))

    # -- tools and structured output ----------------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[Tool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Offer tools. ``tool_choice``: "auto", "none", "any", or a tool's name; the last two force a call,
        which is then sure to match the tool's schema."""
        return self.bind(**bound_tools(tools, tool_choice), **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Answers that match ``schema``: the engine leaves the model no other choice, ``strict`` or not.

        ``method``: "json_schema" and "json_mode" show the model the schema, "function_calling" a tool of
        that schema; "json_mode" without a schema promises JSON only.
        """
        return structured(self, schema, method, include_raw, kwargs)

    # -- about prompts ------------------------------------------------------------------------------------

    def explain(self, input: LanguageModelInput, **kwargs: Any) -> list[dict[str, Any]]:
        """What would be reused for this input, without asking: a row per segment of the prompt, then the
        documents that are not in it; each with tokens, tokens reused, and why not more."""
        return self.chat.explain(self._request_of(input, kwargs))

    def render(self, input: LanguageModelInput, **kwargs: Any) -> str:
        """The prompt's text, as the model reads it."""
        return self.chat.render(self._request_of(input, kwargs))

    def _request_of(self, input: LanguageModelInput, kwargs: dict[str, Any]) -> ChatRequest:
        return self._request(self._convert_input(input).to_messages(), None, kwargs)

    def _request(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]
    ) -> ChatRequest:
        fields = {name: getattr(self, name) for name in _PER_CALL}
        return chat_request(self.chat, messages, stop, {**fields, **kwargs})

    def get_token_ids(self, text: str) -> list[int]:
        """``text`` in the model's own tokens."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self.chat.token_ids(text)

    def get_num_tokens_from_messages(
        self, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the whole prompt, with what the chat template adds."""
        kwargs = bound_tools(tools, None) if tools else {}
        return self.chat.count_tokens(self._request(messages, None, kwargs))

    def close(self) -> None:
        """End the engine, for all objects that share it; or the connections to the server. The next use
        starts it again."""
        if self._chat is not None:
            self._chat.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what LangChain asks ------------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "blendrag"

    @property
    def lc_secrets(self) -> dict[str, str]:
        return {"api_key": "BLENDRAG__API_KEY"}

    @property
    def _identifying_params(self) -> dict[str, Any]:
        fields = {"model", "revision", "temperature", "max_tokens", "top_p", "stop", "seed", "blend"}
        fields |= {"recompute_ratio", "selector", "model_kwargs", "more_settings", "base_url"}
        return self.model_dump(include=fields)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        settings = self.settings
        params = LangSmithParams(
            ls_provider="blendrag",
            ls_model_name=kwargs.get("model") or self.model or without_password(str(self.base_url)),
            ls_model_type="chat",
            ls_temperature=kwargs.get("temperature", settings.temperature),
            ls_max_tokens=kwargs.get("max_tokens") or settings.max_tokens,
        )
        if stop := stop or self.stop:
            params["ls_stop"] = stop
        return params

    def _resolve_model_profile(self) -> ModelProfile | None:
        profile = ModelProfile(
            text_inputs=True,
            text_outputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            tool_calling=True,
            tool_choice=True,
            structured_output=True,
        )
        window = self.chat.context_window_at_hand()
        if window:
            profile["max_input_tokens"] = window
        if most := self.settings.max_tokens or window:
            profile["max_output_tokens"] = most
        return profile
