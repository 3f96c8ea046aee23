"""``ChatBlend``: a LangChain chat model that answers from documents without prefilling them again."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.load.serializable import SerializedConstructor, SerializedNotImplemented
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.runnables.config import ContextThreadPoolExecutor
from langchain_core.tools import BaseTool
from pydantic import Field, PrivateAttr, SecretStr, field_serializer, model_validator

from blendrag import BlendOverrides, ChatModel, Settings, foreign, open_chat, plain, without_password
from blendrag.errors import BlendragWarning, ConfigError
from langchain_blendrag import _convert
from langchain_blendrag._conversation import InConversation, with_conversation
from langchain_blendrag._errors import as_langchain_has_them
from langchain_blendrag._request import SYNONYMS, chat_request, without_tracing
from langchain_blendrag._tools import answer_format, bound_tools, structured

if TYPE_CHECKING:  # imports torch
    from blendrag import ChatRequest, Speculation

# Fields that are settings of blendrag's under the same name; options of a call only; how to reach a server;
# and those that change no answer.
_SETTINGS = ("model", "temperature", "max_tokens", *BlendOverrides.model_fields)
_PER_CALL = (
    "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "n", "stop", "seed", "timeout", "max_retries", "logprobs", "top_logprobs", "reasoning_effort",
    "extra_body", "model_kwargs",
)  # fmt: skip
_HTTP = {
    "default_headers": "headers",
    "default_query": "query",
    "http_client": "client",
    "http_async_client": "async_client",
}
_UNTOLD = ("default_headers", "default_query")
_SECRETS = ("api_key", *_UNTOLD)
_HARMLESS = frozenset(
    {
        "cache", "callbacks", "custom_get_token_ids", "disable_streaming", "http_async_client", "http_client",
        "max_retries", "metadata", "name", "profile", "rate_limiter", "streaming", "tags", "timeout",
        "verbose",
    }
)  # fmt: skip

Tool = Mapping[str, Any] | type | Callable[..., Any] | BaseTool


class ChatBlend(BlendOverrides, InConversation):
    """A chat model on an embedded vLLM engine, or on a server; the documents in a prompt are blended, not
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

    base_url: str | None = None
    """URL of a server, such as ``http://localhost:8000``, whose engine answers."""
    api_key: SecretStr | None = None
    """Key for the server; by default the variable ``BLENDRAG__API_KEY``."""
    model: foreign.ModelName = Field(
        default_factory=lambda given: "" if given.get("base_url") else Settings.load().model,
    )
    """The packaged default, a local folder, or a hub id. Of a server, by default the one that it serves."""
    temperature: float | None = None
    """Randomness of sampling; 0 (the default) always takes the most probable token."""
    max_tokens: int | None = None
    """Most tokens of an answer, thinking included; by default the rest of the model's window."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    n: int | None = Field(None, ge=1)
    """Number of answers to a prompt; ``generate`` gives them all, ``invoke`` the first."""
    stop: list[str] | str | None = None
    """Texts that end an answer; they are not part of it."""
    seed: int | None = None
    timeout: float | None = None
    """Seconds that an answer may take."""
    max_retries: int | None = None
    """Number of times that a request is sent again after the engine failed; by default once."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    """Most probable tokens whose log probabilities are given for each place."""
    reasoning_effort: str | None = None
    """Length of the model's thinking, in its chat template's words, if that has a variable of this name."""
    streaming: bool = False
    kv_dir: Path | None = None
    """Folder of the documents' KV; by default one per model in the cache folder."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """More of vLLM's sampling parameters, such as ``stop_token_ids``."""
    extra_body: dict[str, Any] | None = None
    """More options of a request as vLLM's server reads them, with ``chat_template_kwargs``,
    ``structured_outputs`` and so on."""
    default_headers: dict[str, SecretStr] | None = None
    """Headers sent to the server with every request; so is ``default_query``."""
    default_query: dict[str, SecretStr] | None = None
    http_client: Any = Field(None, exclude=True)
    """An ``httpx2.Client`` that requests to the server go through; it stays its owner's to close."""
    http_async_client: Any = Field(None, exclude=True)
    """An ``httpx2.AsyncClient`` for requests from an event loop."""
    more_settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of blendrag's that are no fields here; given as arguments of their own, or as this."""

    if TYPE_CHECKING:  # fields tell checkers of none of those settings, nor of texts as keys and folders

        def __init__(self, **options: Any) -> None: ...

    _chat: ChatModel | None = PrivateAttr(default=None)
    _chat_made_of: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather_settings(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = foreign.in_our_terms(values, SYNONYMS)
        if values.get("kv_dir") == "":  # of no name: not the folder where one is
            del values["kv_dir"]
        fields = cls.model_fields.keys()
        ours = Settings.model_fields.keys() - fields
        renamed = foreign.FORMER_SETTINGS - fields  # Settings say what they are called now
        given = {name: value for name, value in values.items() if name in fields}
        more = {name: value for name, value in values.items() if name in ours | renamed}
        unknown = values.keys() - fields - ours - renamed - {"settings"}
        options = {name: values[name] for name in unknown & foreign.TAKEN}
        unknown = without_tracing({name: values[name] for name in unknown - foreign.TAKEN}).keys()
        foreign.warn_about(sorted(unknown), {*fields, *ours, *foreign.TAKEN}, stacklevel=5)
        more = {**given.get("more_settings", {}), **values.get("settings", {}), **more}
        options |= given.get("model_kwargs") or {}
        return given | {"more_settings": more, "model_kwargs": options}

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        _ = self.chat  # a wrong value is said now, not with the first question
        idle = [name for name in _HTTP if self.base_url is None and getattr(self, name)]
        if idle:
            said = f"ignored {', '.join(idle)}: without a base_url, nothing is sent"
            warnings.warn(said, BlendragWarning, stacklevel=4)
        return self

    @field_serializer("base_url")
    def _without_password(self, url: str | None) -> str | None:
        return without_password(url) if url else url

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, self._without_password(value) if name == "base_url" else value

    @property
    def settings(self) -> Settings:
        """The settings that the engine is started with, and the defaults of requests."""
        return self.chat.settings

    @property
    def chat(self) -> ChatModel:
        """The framework-free chat under this one."""
        made_of = self.model_dump(include={*_SETTINGS, *_HTTP, "more_settings", "kv_dir", "api_key"})
        made_of |= {name: getattr(self, name) for name in ("base_url", "http_client", "http_async_client")}
        if self._chat is None or self._chat_made_of != made_of:
            ours = {name: value for name in _SETTINGS if (value := getattr(self, name)) is not None}
            given = foreign.engine_settings({**self.more_settings, **ours, "model": self.model or None})
            http = {name: _told(getattr(self, field)) for field, name in _HTTP.items()}
            self._chat = open_chat(given, self.kv_dir, self.base_url, _told(self.api_key), **http)
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
        requests, times = self._requests(messages, stop, kwargs)
        with as_langchain_has_them(), ContextThreadPoolExecutor(len(requests)) as threads:
            # One is computed in this thread: whoever interrupts it has it stopped.
            answers = [*(threads.map if requests[1:] else map)(self.chat.complete, requests)]
        return _convert.chat_result(answers * times)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        requests, times = self._requests(messages, stop, kwargs)
        with as_langchain_has_them():
            answers = await asyncio.gather(*map(self.chat.acomplete, requests))
        return _convert.chat_result(answers * times)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        pieces = self.chat.stream(self._one_request(messages, stop, kwargs))
        with as_langchain_has_them(), contextlib.closing(pieces):
            for piece in pieces:
                yield from _convert.chat_chunks(piece)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        pieces = self.chat.astream(self._one_request(messages, stop, kwargs))
        with as_langchain_has_them():
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    for chunk in _convert.chat_chunks(piece):
                        yield chunk

    def speculate(self, input: LanguageModelInput, **kwargs: Any) -> Speculation:
        """Say what will be asked soon, if nothing changes: its answer may be begun, and kept back. Asking
        exactly this adopts it; anything else, or ``end()`` of what is returned, ends it."""
        return self.chat.speculate(self._request_of(input, with_conversation(None, kwargs)))

    async def aspeculate(self, input: LanguageModelInput, **kwargs: Any) -> Speculation:
        """Do as ``speculate`` in an event loop."""
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
        schema: Any = None,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return a model whose answers match ``schema``: the engine leaves it no other choice, ``strict`` or
        not.

        ``method``: "json_schema" and "json_mode" show the model the schema, "function_calling" a tool of
        that schema; "json_mode" without a schema promises JSON only. Raises OutputParserException, or with
        ``include_raw`` gives it as ``parsing_error``, for an answer that was cut off.
        """
        return structured(self, schema, method, include_raw, kwargs)

    # -- about prompts ------------------------------------------------------------------------------------

    def explain(self, input: LanguageModelInput, **kwargs: Any) -> list[dict[str, Any]]:
        """Return what would be reused for this input, without asking: a row per segment of the prompt, then
        the documents that are not in it; each with tokens, tokens reused, and why not more."""
        return self.chat.explain(self._request_of(input, kwargs))

    def render(self, input: LanguageModelInput, **kwargs: Any) -> str:
        """Return the prompt's text, as the model reads it."""
        return self.chat.render(self._request_of(input, kwargs))

    def _request_of(self, input: LanguageModelInput, kwargs: dict[str, Any]) -> ChatRequest:
        return self._request(self._convert_input(input).to_messages(), None, kwargs)

    def _request(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]
    ) -> ChatRequest:
        return chat_request(self.chat, messages, stop, self._options(kwargs))

    def _one_request(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]
    ) -> ChatRequest:
        options = self._options(kwargs)
        if options.get("n", 1) != 1:
            raise ConfigError("a stream is one answer: n is for generate and invoke")
        return chat_request(self.chat, messages, stop, options)

    def _requests(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]
    ) -> tuple[list[ChatRequest], int]:
        """Return what to ask for the answers that are wanted, and how often each is one of them."""
        options = self._options(kwargs)
        request, count = chat_request(self.chat, messages, stop, options), options.get("n", 1)
        if not isinstance(count, int) or count < 1:
            raise ConfigError(f"n has to be a number of answers, not {count!r}")
        sampling = request.sampling
        if sampling.temperature == 0:
            return [request], count
        seeds = [None if sampling.seed is None else sampling.seed + number for number in range(count)]
        return [replace(request, sampling=replace(sampling, seed=seed)) for seed in seeds], 1

    def _options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in _PER_CALL}
        return foreign.call_options(fields, without_tracing(kwargs), also=("model", "n"))

    def get_token_ids(self, text: str) -> list[int]:
        """Return ``text`` in the model's own tokens."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self.chat.token_ids(text)

    def get_num_tokens_from_messages(
        self, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Return how many tokens the whole prompt has, with what the chat template adds."""
        if not messages:
            return 0
        kwargs = bound_tools(tools, None) if tools else {}
        with as_langchain_has_them():
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

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return True

    @property
    def lc_secrets(self) -> dict[str, str]:
        return {"api_key": "BLENDRAG__API_KEY"}

    def to_json(self) -> SerializedConstructor | SerializedNotImplemented:
        """Return what ``langchain_core.load`` makes this object of again: without secrets, which are a
        variable's, and without headers and query, which may be some."""
        made = super().to_json()
        if made["type"] == "constructor":
            kwargs = {name: value for name, value in made["kwargs"].items() if name not in _UNTOLD}
            if self.base_url:
                kwargs["base_url"] = without_password(self.base_url)
            made["kwargs"] = plain(kwargs)
        return made

    @property
    def _llm_type(self) -> str:
        return _convert.PROVIDER

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """The parameters that change an answer, without what is secret, for traces."""
        return self.model_dump(exclude={*_HARMLESS, *_SECRETS})

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """Return what LangChain's response cache goes by: a digest of all that may change an answer, secrets
        too."""
        fields = {name: getattr(self, name) for name in type(self).model_fields if name not in _HARMLESS}
        of_call = {
            name: answer_format(value) if name == "response_format" and isinstance(value, type) else value
            for name, value in sorted(kwargs.items())
            if name not in (*_HARMLESS, "conversation") and not name.startswith("ls_")
        }
        secrets = {name: _told(fields[name]) for name in _SECRETS}
        whole = plain([{**fields, **secrets}, self.settings.model_dump(), stop, of_call])
        return f"blendrag {hashlib.sha256(json.dumps(whole).encode()).hexdigest()}"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        settings, model = self.settings, kwargs.get("model") or self.model
        if not model and self.chat.context_window_at_hand():  # the server has said what it serves
            model = self.chat.model_name
        params = LangSmithParams(
            ls_provider=_convert.PROVIDER,
            ls_model_name=model or without_password(str(self.base_url)),
            ls_model_type="chat",
            ls_temperature=kwargs.get("temperature", settings.temperature),
            ls_max_tokens=kwargs.get("max_tokens") or settings.max_tokens,
        )
        if stop := stop or ([self.stop] if isinstance(self.stop, str) else self.stop):
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


def _told(secret: Any) -> Any:
    """Return the values of secrets, which a field keeps to itself."""
    if isinstance(secret, dict):
        return {name: _told(value) for name, value in secret.items()}
    return secret.get_secret_value() if isinstance(secret, SecretStr) else secret
