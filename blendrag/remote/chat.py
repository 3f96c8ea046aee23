"""``RemoteChat``: a chat model on a server, by its OpenAI routes and the field ``blendrag``."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import httpx2

from blendrag.chat.chat import Chat
from blendrag.chat.interface import ChatModel
from blendrag.chat.messages import with_roles
from blendrag.chat.request import ChatRequest, RequestOptions, make_request
from blendrag.chat.tools import TemplateFacts, answer_grammar, offered_tools, with_tools, without_control
from blendrag.errors import BlendragError, ConfigError, ServerBusyError
from blendrag.names import closest
from blendrag.options import BlendKeywords, BlendOverrides, Step, spelled_out
from blendrag.prompt import Messages
from blendrag.remote.collection import RemoteCollection
from blendrag.remote.http import Server, made, refusal, understood
from blendrag.remote.reading import Reader, timeout_of
from blendrag.settings import Settings
from blendrag.text import encodable

_CHAT, _COMPLETIONS = "v1/chat/completions", "v1/completions"
_BETWEEN_ATTEMPTS_S = 1.0
_LONGEST_WAIT_S = 60.0
_PREFETCH_S = 5.0
_PREFETCHES = 4
_TEXT_CHARACTERS = 1 << 20  # of one text; servers take twice as many

# Settings that a client has a use for; all others are the server's.
_OURS = frozenset(
    {
        "cache_dir", "chat_template_kwargs", "chunk_overlap", "chunk_tokens", "embedder", "max_tokens",
        "model", "separator", "system_prompt", "temperature", "similarity_top_k",
        *BlendOverrides.model_fields,
    }
)  # fmt: skip
_OF_BLENDING = tuple(BlendKeywords.__annotations__)

# Sampling parameters that vLLM's routes take: they ignore what they do not know.
_SAMPLING = frozenset(
    {
        "allowed_token_ids", "bad_words", "frequency_penalty", "ignore_eos", "include_stop_str_in_output",
        "length_penalty", "logit_bias", "min_p", "min_tokens", "presence_penalty", "repetition_detection",
        "repetition_penalty", "skip_special_tokens", "spaces_between_special_tokens", "stop_token_ids",
        "thinking_token_budget", "top_k",
    }
)  # fmt: skip


def open_chat(
    settings: Mapping[str, Any],
    kv_dir: Path | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    **http: Any,
) -> ChatModel:
    """Open a chat on this process's own engine; or, with ``base_url``, on a server. settings: those given, by
    name; None: not given. http: as :class:`Server` takes it. A key without a URL is another provider's, and
    so is how to reach one. Raises ConfigError for settings that are not for the one that it is."""
    if base_url is not None:
        if kv_dir is not None:
            raise ConfigError("kv_dir is the server's to say: it is not for a base_url")
        return RemoteChat(base_url, api_key, http=http, **settings)
    return Chat(Settings.load(**settings), kv_dir)


@dataclass(frozen=True, slots=True)
class _Request(ChatRequest):
    """A request to a server. blending: options of it; the rest is as the server has it."""

    blending: tuple[tuple[str, Any], ...] = ()


class _ModelFacts(NamedTuple):
    """The facts that a server tells of its model, by its own names."""

    name: str
    context_window: int
    template: TemplateFacts
    tool_parser: str


class _Plan(NamedTuple):
    """A server's plan of a prompt: its text, its rows, and the number of its tokens."""

    text: str
    rows: list[dict[str, Any]]
    tokens: int


class RemoteChat(ChatModel):
    """A chat model on a server. Answers as :class:`Chat` does, with the same evidence; the engine, the texts
    and their KV are the server's, which renders prompts and recognises documents in them.

    http: headers, query, client and async_client, as :class:`Server` takes them.
    settings: those of requests; what they do not say of blending, and the model if none is named, is as the
    server has it. Raises ConfigError for settings that are the server's.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        http: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        for name in sorted(name for name, value in settings.items() if value is not None):
            if name in Settings.model_fields and name not in _OURS:
                raise ConfigError(f"{name} is the server's to say: it is not for a base_url")
        self.settings = Settings.load(**settings)
        self.server = Server(base_url, api_key, **(http or {}))
        self._known: _ModelFacts | None = None

    # -- about the server ---------------------------------------------------------------------------------

    def _model(self, **more: Any) -> _ModelFacts:
        """Return what the server says of its model: asked once."""
        if self._known is None:
            found = self.server.call("GET", "v1/kb/model", **more)
            with understood(self.server):
                self._known = _ModelFacts(
                    str(found["name"]),
                    int(found["context_window"]),
                    made(TemplateFacts, found["template"]),
                    str(found.get("tool_parser") or ""),
                )
        return self._known

    @property
    def _named(self) -> str | None:
        """The model, if the user named one."""
        return self.settings.model if "model" in self.settings.model_fields_set else None

    @property
    def model_name(self) -> str:
        return self._named or self._model().name

    @property
    def context_window(self) -> int:
        return self._model().context_window

    @property
    def tool_parser(self) -> str:
        """Name, in vLLM, of the parser with which the server reads calls that the model may make; empty where
        it reads none, and they are read here."""
        return self._model().tool_parser

    @property
    def knows_tools(self) -> bool:
        """Return whether the chat template writes tools itself."""
        return self._model().template.knows_tools

    def context_window_at_hand(self) -> int | None:
        return None if self._known is None else self.context_window

    def collection(self, name: str) -> RemoteCollection:
        return RemoteCollection(self.server, name)

    def prefetch(self, texts: Iterable[str]) -> None:
        body = {"texts": [encodable(text) for text in texts]}
        if body["texts"]:
            _background(os.getpid()).submit(lambda: self._prefetch(body))

    def _prefetch(self, body: dict[str, Any]) -> None:
        with contextlib.suppress(BlendragError):  # who asks will be told
            self.server.call("POST", "v1/kb/prefetch", body, timeout=_PREFETCH_S)

    def close(self) -> None:
        """End the connections. The next use makes others."""
        self._known = None
        self.server.close()

    # -- generation ---------------------------------------------------------------------------------------

    def request(self, messages: Messages | str, **options: Unpack[RequestOptions]) -> _Request:
        request = make_request(self.settings, messages, options)
        for name in request.sampling.other:
            if name not in _SAMPLING:
                raise ConfigError(f"unknown option {name!r}{closest(name, {*_SAMPLING, *options})}")
        given: Mapping[str, Any] = options
        own = {name: given[name] for name in _OF_BLENDING if given.get(name) is not None}
        overridden = {"quality", *Step._fields} if "quality" in own else set()  # for which it stands
        included = BlendOverrides.model_fields.keys() - overridden
        blending = self.settings.model_dump(include=included, exclude_unset=True)
        blending |= own if "quality" in own else spelled_out(own)
        fields = {name: getattr(request, name) for name in ChatRequest.__dataclass_fields__}
        return _Request(**fields, blending=tuple(blending.items()))

    def _attempt(self, request: ChatRequest) -> Reader:
        reader = Reader(self.server, request)
        with reader.clear():
            path = _COMPLETIONS if isinstance(request.messages, str) else _CHAT
            reader.asked = "POST", path, self._body(request)
        return reader

    def _repeated_after(self, error: BlendragError) -> float | None:
        """Return in how many seconds to ask again a server that is full, starts again, or broke off."""
        if isinstance(error, ServerBusyError):
            after = _BETWEEN_ATTEMPTS_S if error.retry_after_s is None else error.retry_after_s
            return after if after <= _LONGEST_WAIT_S else None
        return _BETWEEN_ATTEMPTS_S if isinstance(error.__cause__, httpx2.ConnectError) else None

    def _body(self, request: ChatRequest) -> dict[str, Any]:
        if request.sampling.max_tokens is None and isinstance(request.messages, str):
            # Of a rendered prompt, vLLM's route takes no limit for 16 tokens.
            request = request.within(self.context_window - self.count_tokens(request))
        sampling = request.sampling
        blending: dict[str, Any] = {"documents": list(request.documents), "evidence": True}
        blending |= dict(request.blending) if isinstance(request, _Request) else {}
        blending |= {"conversation": request.conversation} if request.conversation else {}
        logprobs: dict[str, Any] = {"logprobs": sampling.logprobs}
        if sampling.logprobs is not None and not isinstance(request.messages, str):
            logprobs = {"logprobs": True, "top_logprobs": sampling.logprobs}
        body: dict[str, Any] = {
            **self._prompt(request),
            "model": self._named,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop) or None,
            "seed": sampling.seed,
            **logprobs,
            **sampling.other,
            "structured_outputs": self._structured_outputs(request),
            "stream": True,
            "stream_options": {"include_usage": True},
            "blendrag": blending,
        }
        return {name: value for name, value in body.items() if value is not None}

    def _structured_outputs(self, request: ChatRequest) -> dict[str, Any] | None:
        """Return what the answer has to match; half of the window is taken to be left for it."""
        if request.sampling.max_tokens is None and (request.forced or request.schema or request.grammar):
            request = request.within(self.context_window // 2)
        grammar = answer_grammar(request)
        return {grammar.kind: grammar.value} if grammar else None

    def _prompt(self, request: ChatRequest) -> dict[str, Any]:
        """Return messages and tools as embedded engines' models get them, but for control tokens, which the
        server would take for markup. Calls that the model may make are read by the server, if it has a
        parser."""
        if isinstance(request.messages, str):
            return {"prompt": request.messages}
        about = self._model(**timeout_of(request))
        template = about.template
        messages, options = with_tools(template, request)
        if request.offered and about.tool_parser and not request.held:
            options |= offered_tools(template, request)
            options |= {"tool_choice": "auto", "parallel_tool_calls": request.parallel_tool_calls}
        elif "tools" in options:
            options["tool_choice"] = "none"
        if request.chat_template_kwargs:
            options["chat_template_kwargs"] = request.chat_template_kwargs
        fitted = with_roles(
            messages,
            system=template.takes_system,
            later=template.takes_later,
            welcome=template.takes_welcome,
            calls=template.takes_calls,
        )
        return {"messages": [_as_openai(message, template) for message in fitted], **options}

    # -- about prompts ------------------------------------------------------------------------------------

    def _planned(self, request: ChatRequest) -> _Plan:
        about = {"documents": list(request.documents)}
        found = self.server.call("POST", "v1/kb/explain", {**self._prompt(request), "blendrag": about})
        with understood(self.server):
            if found["text"] is None:
                raise refusal(f"{self.server}: {found['plain']}")
            return _Plan(str(found["text"]), list(found["rows"]), int(found["tokens"]))

    def render(self, request: ChatRequest) -> str:
        return self._planned(request).text

    def explain(self, request: ChatRequest) -> list[dict[str, Any]]:
        return self._planned(request).rows

    def count_tokens(self, request: ChatRequest) -> int:
        return self._planned(request).tokens

    def token_ids(self, text: str) -> list[int]:
        """Return a text's tokens, none over the cuts of one that is too long for a request."""
        return self._of_parts(text, "v1/kb/tokens", "token_ids")

    def split(self, text: str) -> list[str]:
        """Return a document in chunks of as many tokens as the settings say, none over the cuts of one that
        is too long for a request."""
        s = self.settings
        of_chunks = {"chunk_tokens": s.chunk_tokens, "chunk_overlap": s.chunk_overlap}
        return self._of_parts(text, "v1/kb/split", "pieces", **of_chunks)

    def _of_parts(self, text: str, path: str, name: str, **more: Any) -> list[Any]:
        """Return what the server makes of each part of a text, under a name in its answer."""
        whole = list[Any]()
        for part in _parts(text):
            found = self.server.call("POST", path, {"texts": [part], **more})
            with understood(self.server):
                (some,) = found[name]
                whole += some
        return whole


def _parts(text: str) -> Iterator[str]:
    """Yield a text in parts that a request may hold, cut behind a paragraph, a line or a word if there is
    one."""
    while len(text) > _TEXT_CHARACTERS:
        ends = (text.rfind(gap, 0, _TEXT_CHARACTERS) + len(gap) for gap in ("\n\n", "\n", " "))
        at = next((end for end in ends if end > _TEXT_CHARACTERS // 2), _TEXT_CHARACTERS)
        yield text[:at]
        text = text[at:]
    yield text


def _as_openai(message: Mapping[str, Any], template: TemplateFacts) -> dict[str, Any]:
    """Return a message without control tokens, and with the arguments of its calls as text."""
    harmless = {**message, "content": without_control(template.control_tokens, message.get("content"))}
    if calls := message.get("tool_calls"):
        each = [(call, call["function"]) for call in calls]
        harmless["tool_calls"] = [
            {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}
            for call, function in each
        ]
    return harmless


class _Background:
    """A thread for what nobody waits for, nor the end of the process: the latest few, in turn."""

    def __init__(self) -> None:
        self._latest: deque[Callable[[], None]] = deque(maxlen=_PREFETCHES)
        self._given = threading.Semaphore(0)
        threading.Thread(target=self._run, name="blendrag-prefetch", daemon=True).start()

    def submit(self, work: Callable[[], None]) -> None:
        self._latest.append(work)
        self._given.release()

    def _run(self) -> None:
        while self._given.acquire():
            with contextlib.suppress(Exception):  # given more than it keeps, it runs dry
                self._latest.popleft()()


@functools.cache
def _background(process: int) -> _Background:
    """Return the thread of this process: a fork has none of its parent's."""
    return _Background()
