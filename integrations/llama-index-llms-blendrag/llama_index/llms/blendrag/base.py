"""``BlendLLM``: a LlamaIndex LLM that answers from documents without prefilling them again."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr, model_validator
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.program.function_program import get_function_tool
from pydantic import SecretStr, field_serializer

from blendrag import BlendOverrides, ChatModel, Settings, foreign, open_chat, without_password
from blendrag.errors import BlendragWarning
from llama_index.llms.blendrag.calls import COUNTS, OFFERED_ONLY, STRUCTURED, Call, refuse_cut_call
from llama_index.llms.blendrag.messages import as_completion
from llama_index.llms.blendrag.structured import StructuredByGrammar

if TYPE_CHECKING:
    from llama_index.core.chat_engine.types import AgentChatResponse
    from llama_index.core.tools.types import BaseTool

    from blendrag import KeptDocuments, Speculation

# Fields that are settings of blendrag's under the same name; and those that are options of a call only.
_SETTINGS = ("model", "temperature", "max_tokens", *BlendOverrides.model_fields)
_PER_CALL = ("top_p", "stop", "seed", "timeout", "max_retries", "logprobs", "top_logprobs")
# How a server is reached: what blendrag's client calls the fields.
_HTTP = {"headers": "default_headers", "client": "http_client", "async_client": "async_http_client"}
_ALIASES = {
    **foreign.ALIASES,
    "api_base": "base_url",
    "api_url": "base_url",
    "max_model_len": "context_window",
    "model_name": "model",
}


class BlendLLM(BlendOverrides, StructuredByGrammar):
    """An LLM on an embedded vLLM engine, or on a server; the documents in a prompt are blended, not
    prefilled.

    Texts that a ``BlendChromaVectorStore`` or ``warm`` has seen are recognised in any prompt; their stored
    KV is used. Everything else is read as usual. Making one starts nothing: the engine starts with the first
    use and is shared by all objects of the same configuration; ``close()`` ends it. With ``base_url``, model,
    texts and their KV are those of a server (``blendrag serve``), and no engine is started here.

    Settings of blendrag that are no fields here (``kv_cache_gib=4``) may be given as well. Any option but
    those that the engine is started with may also be given per call; ``documents`` too (texts or nodes known
    to be in the prompt), ``logprobs`` (how many per token) and ``grammar`` (a JSON schema, or a
    ``blendrag.Grammar``). Names of LlamaIndex's classes for OpenAI and vLLM are taken where they mean
    something; one that nobody knows is ignored with a warning.

    Example:
        ```python
        Settings.llm = BlendLLM()  # model="...": a folder or a hub id; without one, a small packaged model
        Settings.tokenizer = Settings.llm.token_ids
        ```
    """

    base_url: str | None = Field(
        None,
        description="URL of a server, such as http://localhost:8000, whose engine answers.",
        frozen=True,
    )
    api_key: SecretStr | None = Field(
        None,
        description="Key for the server; by default the variable BLENDRAG__API_KEY.",
        exclude=True,
        frozen=True,
    )
    model: foreign.ModelName = Field(
        default_factory=lambda given: "" if given.get("base_url") else Settings.load().model,
        description="The packaged default, a folder, or a hub id; of a server, by default what it serves.",
        frozen=True,
    )
    context_window: int | None = Field(
        None, description="Tokens of prompt and answer together, if fewer than the model's own.", frozen=True
    )
    kv_dir: Path | None = Field(
        None,
        description="Folder of the texts' KV; by default one per model in the cache folder.",
        frozen=True,
    )
    more_settings: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of blendrag's that are no fields here, which may be given as arguments too.",
        frozen=True,
    )
    temperature: float | None = Field(
        None,
        description="Randomness of sampling; 0 (the default) always takes the most probable token.",
        ge=0,
    )
    max_tokens: int | None = Field(
        None, description="Most tokens of an answer; None: the rest of the window.", ge=1
    )
    top_p: float = Field(1.0, gt=0, le=1)
    stop: list[str] | str | None = Field(
        None, description="Texts that end an answer; they are not part of it."
    )
    seed: int | None = None
    timeout: float | None = Field(None, description="Seconds that an answer may take.", gt=0)
    max_retries: int = Field(
        1, description="How often a request is sent again after the engine failed.", ge=0
    )
    logprobs: bool | int | None = Field(
        None, description="Whether log probabilities are given, or how many for each token."
    )
    top_logprobs: int | None = Field(
        None, description="Number of log probabilities that are given for each token."
    )
    additional_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="More options of calls, which may be given as arguments too."
    )
    default_headers: dict[str, str] | None = Field(
        None,
        description="Headers sent to the server with every request.",
        exclude=True,
        frozen=True,
        repr=False,
    )
    http_client: Any = Field(None, description="An httpx2.Client for the server.", exclude=True, frozen=True)
    async_http_client: Any = Field(
        None, description="An httpx2.AsyncClient for the server.", exclude=True, frozen=True
    )
    is_function_calling_model: bool = Field(
        True,
        description="Whether tools are offered to the model; else LlamaIndex has it write calls as text.",
    )
    conversation: str | None = Field(
        None, description="Id of the conversation; None: told from its messages."
    )

    if TYPE_CHECKING:  # fields tell checkers of none of those settings, nor of texts as keys and folders

        def __init__(self, **options: Any) -> None: ...

    _chat_made: ChatModel | None = PrivateAttr(default=None)
    _chat_made_of: dict[str, Any] = PrivateAttr(default_factory=dict)
    _window: int | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _gather_settings(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        values = {**(values.pop("vllm_kwargs", None) or {}), **values.pop("engine_options", {}), **values}
        if values.get("kv_dir") == "":  # of no name: not the folder where one is
            del values["kv_dir"]
        given: dict[str, Any] = {}
        more, options = dict(values.get("more_settings", {})), dict(values.get("additional_kwargs") or {})
        settings = {*Settings.model_fields, *foreign.FORMER_SETTINGS}
        for name, value in values.items():
            if name in cls.model_fields:
                given[name] = value
            elif (own := _ALIASES.get(name, name)) in cls.model_fields:
                given.setdefault(own, value)
            elif name in settings:
                more[name] = value
            elif name in foreign.TAKEN or name in COUNTS:
                options[name] = value
            else:
                foreign.warn_about(
                    [name], {*cls.model_fields, *_ALIASES, *settings, *foreign.TAKEN}, stacklevel=3
                )
        return given | {"more_settings": more, "additional_kwargs": options}

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        _ = self.settings  # a wrong value is said now, not with the first question
        idle = [name for name in _HTTP.values() if self.base_url is None and getattr(self, name)]
        if idle:
            said = f"ignored {', '.join(idle)}: without a base_url, nothing is sent"
            warnings.warn(said, BlendragWarning, stacklevel=2)
        return self

    @field_serializer("base_url")
    def _without_password(self, url: str | None) -> str | None:
        return without_password(url) if url else url

    @field_serializer("kv_dir")
    def _as_json(self, folder: Path | None) -> str | None:
        return None if folder is None else str(folder)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, self._without_password(value) if name == "base_url" else value

    @classmethod
    def class_name(cls) -> str:
        return "BlendLLM"

    @property
    def settings(self) -> Settings:
        """The settings that the engine is started with, and the defaults of requests."""
        return self._chat.settings

    @property
    def _chat(self) -> ChatModel:
        made_of = {name: getattr(self, name) for name in _SETTINGS}
        if self._chat_made is None or self._chat_made_of != made_of:
            embedded = {} if self.base_url else {"max_model_len": self.context_window}
            ours = {name: value for name, value in made_of.items() if value is not None}
            own = {**self.more_settings, **ours, "model": self.model or None, **embedded}
            given = foreign.engine_settings(own)
            key = self.api_key.get_secret_value() if self.api_key else None
            self._chat_made = open_chat(
                given,
                self.kv_dir,
                self.base_url,
                key,
                **{name: getattr(self, field) for name, field in _HTTP.items()},
            )
            self._chat_made_of = made_of
        return self._chat_made

    def collection(self, name: str) -> KeptDocuments:
        """Return the collection of one vector store's documents, whose KV is kept. ``name`` tells it from
        others."""
        return self._chat.collection(name)

    def prefetch(self, texts: Iterable[str]) -> None:
        """Begin to read the KV of these texts into memory. Opens and starts nothing; returns at once."""
        self._chat.prefetch(texts)

    def order(self, texts: Iterable[str]) -> list[int]:
        """Return the places of texts that were found, in the order in which they go into a prompt (setting
        ``order``). Opens and starts nothing."""
        return self._chat.order(texts)

    @property
    def metadata(self) -> LLMMetadata:
        """Facts about the model. Starts no engine; asks a server. Raises ModelNotFoundError, ServerError."""
        if self._window is None:
            window = self._chat.context_window
            self._window = min(window, self.context_window or window)
        return LLMMetadata(
            context_window=self._window,
            num_output=self.settings.max_tokens or -1,
            is_chat_model=True,
            is_function_calling_model=self.is_function_calling_model,
            model_name=self._chat.model_name,
            system_role=MessageRole.SYSTEM,
        )

    def to_payload(self) -> dict[str, Any]:
        """Return a dictionary for events; of the metadata, what can be told without looking at the model,
        which takes time."""
        names = ("temperature", "max_tokens", "top_p", "seed", *BlendOverrides.model_fields)
        known = self.metadata.model_dump() if self._window is not None else {"model_name": self.model}
        return {"class_name": self.class_name(), **known, **{name: getattr(self, name) for name in names}}

    def close(self) -> None:
        """End the engine, for all objects that share it; or the connections to the server. The next use
        starts it again."""
        self._chat.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the nine methods ---------------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self._answer(self._call(messages, kwargs))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return self._stream(self._call(messages, kwargs))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return await self._aanswer(self._call(messages, kwargs))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        return self._astream(self._call(messages, kwargs))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return as_completion(self._answer(self._completion_call(prompt, formatted, kwargs)))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        responses = self._stream(self._completion_call(prompt, formatted, kwargs))
        return (as_completion(response) for response in responses)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return as_completion(await self._aanswer(self._completion_call(prompt, formatted, kwargs)))

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        responses = self._astream(self._completion_call(prompt, formatted, kwargs))
        return (as_completion(response) async for response in responses)

    def _completion_call(self, prompt: str, formatted: bool, options: dict[str, Any]) -> Call:
        """Return the call of a completion. ``formatted``: the text is the whole prompt; else it is what a
        user says."""
        return self._call(prompt if formatted else [ChatMessage(prompt)], options)

    def _call(self, messages: Sequence[ChatMessage] | str, options: dict[str, Any]) -> Call:
        fields = {name: getattr(self, name) for name in _PER_CALL}
        return Call(self._chat, messages, [fields, self.additional_kwargs, options], self.conversation)

    def _answer(self, call: Call) -> ChatResponse:
        return call.end(self._chat.complete(call.request))

    async def _aanswer(self, call: Call) -> ChatResponse:
        return call.end(await self._chat.acomplete(call.request))

    def _stream(self, call: Call) -> Generator[ChatResponse, None, None]:
        with contextlib.closing(self._chat.stream(call.request)) as pieces:
            for piece in pieces:
                if piece.text or piece.reasoning or piece.answer:
                    yield (response := call.feed(piece))
            if call.request.offered:
                refuse_cut_call(response)

    async def _astream(self, call: Call) -> AsyncGenerator[ChatResponse, None]:
        async with contextlib.aclosing(self._chat.astream(call.request)) as pieces:
            async for piece in pieces:
                if piece.text or piece.reasoning or piece.answer:
                    yield (response := call.feed(piece))
            if call.request.offered:
                refuse_cut_call(response)

    def speculate(self, messages: Sequence[ChatMessage] | str, **kwargs: Any) -> Speculation:
        """Say what will be asked soon, if nothing changes: its answer may be begun, and kept back. Asking
        exactly this adopts it; anything else, or ``end()`` of what is returned, ends it."""
        return self._chat.speculate(self._call(messages, kwargs).request)

    async def aspeculate(self, messages: Sequence[ChatMessage] | str, **kwargs: Any) -> Speculation:
        """Do as ``speculate`` in an event loop."""
        return await self._chat.aspeculate(self._call(messages, kwargs).request)

    # -- tools --------------------------------------------------------------------------------------------

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: str | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Prepare a chat that offers tools. ``tool_required``, or a tool's name as ``tool_choice``, forces a
        call that fits its schema; and so does a program of LlamaIndex's, which asks for none where it
        streams."""
        if any(map(_is_program, tools)):
            tool_required, kwargs = True, {STRUCTURED: True, **kwargs}
        if isinstance(user_msg, str):
            user_msg = ChatMessage(user_msg)
        return {
            "messages": [*(chat_history or ()), *([user_msg] if user_msg else ())],
            "tools": [_described(tool) for tool in tools],
            "tool_choice": tool_choice or ("required" if tool_required and tools else None),
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def predict_and_call(self, *args: Any, **kwargs: Any) -> AgentChatResponse:
        """Have the model call tools, and call them; a call of one that there is not counts as none."""
        return super().predict_and_call(*args, **{**kwargs, OFFERED_ONLY: True})

    async def apredict_and_call(self, *args: Any, **kwargs: Any) -> AgentChatResponse:
        return await super().apredict_and_call(*args, **{**kwargs, OFFERED_ONLY: True})

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the calls in a response, those of tools that there are not too.

        Raises ValueError, as LlamaIndex expects, if there are none; AnswerCutError, which is one too, if a
        call was cut, or there is nothing but calls that cannot be read, whether or not one is expected: an
        agent would take it for a last, empty answer.
        """
        refuse_cut_call(response)
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not calls and error_on_no_tool_call:
            raise ValueError(f"the model called no tool, it answered: {response.message.content!r}")
        return [
            ToolSelection(
                tool_id=call.tool_call_id or "",
                tool_name=call.tool_name,
                tool_kwargs=call.tool_kwargs,  # type: ignore[arg-type]  # ours are never text
            )
            for call in calls
        ]

    # -- about prompts ------------------------------------------------------------------------------------

    def explain(self, messages: Sequence[ChatMessage] | str, **kwargs: Any) -> list[dict[str, Any]]:
        """Return what would be reused for these messages (or this formatted prompt), without asking: a row
        per segment of the prompt, then the documents that are not in it; each with tokens, tokens reused, and
        why not more."""
        return self._chat.explain(self._call(messages, kwargs).request)

    def render(self, messages: Sequence[ChatMessage], **kwargs: Any) -> str:
        """Return the prompt's text, as the model reads it."""
        return self._chat.render(self._call(messages, kwargs).request)

    def token_ids(self, text: str) -> list[int]:
        """Return ``text`` in the model's own tokens; fit for ``Settings.tokenizer``."""
        return self._chat.token_ids(text)


def _is_program(tool: BaseTool) -> bool:
    """Return whether a tool is that of a program, which parses the call and makes an object of a class."""
    return getattr(getattr(tool, "fn", None), "__module__", "") == get_function_tool.__module__


def _described(tool: BaseTool) -> dict[str, Any]:
    # Not metadata.to_openai_tool: it changes names, by which LlamaIndex then does not find the tool.
    about = tool.metadata
    parameters = about.get_parameters_dict()
    function = {
        "name": about.get_name(),
        "description": about.description,
        "parameters": foreign.class_schema(parameters) if _is_program(tool) else parameters,
    }
    return {"type": "function", "function": function}
