"""Requests in plain data: the one vocabulary of options, and the request that they make."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from numbers import Integral, Real
from threading import TIMEOUT_MAX
from typing import Any, Self

from blendrag.engine.client.generation import Grammar, Sampling
from blendrag.errors import BlendragWarning, ConfigError
from blendrag.names import closest
from blendrag.options import BlendKeywords, BlendOptions, resolved
from blendrag.prompt import Messages, PromptPlan
from blendrag.settings import RENAMED, Settings
from blendrag.text import encodable, plain

ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Names that a call's arguments have, of models and frameworks."""
AUTO, NONE, REQUIRED = "auto", "none", "required"
# Options that are numbers, and the least that each may be.
_NUMBERS: dict[str, tuple[type, int]] = {
    "max_tokens": (Integral, 1),
    "max_retries": (Integral, 0),
    "temperature": (Real, 0),
    "top_p": (Real, 0),
    "timeout": (Real, 0),
}


class RequestOptions(BlendKeywords, total=False):
    """Options of one request; None stands for the setting, or for none. Those of blending are inherited.

    max_tokens: of the answer, thinking included; None stands for the setting, and that one's None for the
    rest of the window.
    kv_budget: the engine has to be started with the setting; one that is longer than the prompt keeps all of
    its KV. trace: the evidence says what was loaded and computed when.
    chat_template_kwargs: variables of the model's chat template, beside the setting's, by name.
    documents: texts known to be in the prompt; they are looked for first, and reported on.
    conversation: the caller's id of the conversation, for eviction policies that ask whether it goes on; None
    stands for the one that the messages' opening gives.
    max_retries: how often a request is sent again after the engine failed, before anything was given out; or
    an answer goes on behind what was, without tools, schema, grammar or seed.
    timeout: seconds that the answer may take. logprobs: how many per token.
    tools: functions as OpenAI describes them. tool_choice: "auto", "none", "required", or a tool's name.
    parallel_tool_calls: False keeps the first call of an answer and drops the others.
    schema: JSON schema that the answer has to match; the model is shown it, and held to it.
    grammar: what the answer has to match; a JSON schema is not shown to the model.
    other: more of vLLM's ``SamplingParams``.
    """

    chat_template_kwargs: Mapping[str, Any] | None
    documents: Iterable[str] | None
    conversation: str | None
    max_retries: int | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    stop: str | Sequence[str] | None
    seed: int | None
    timeout: float | None
    logprobs: int | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | None
    parallel_tool_calls: bool | None
    schema: Mapping[str, Any] | None
    grammar: Grammar | Mapping[str, Any] | None
    other: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Source:
    """A chunk that was retrieved. ``score``: cosine similarity to the question, at most 1. ``key``: names its
    KV. ``attention``: its share of the attention that the question pays to all cached tokens, if that was
    read. ``metadata``: its document's."""

    source: str
    ordinal: int
    score: float
    text: str
    key: str = ""
    attention: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request; ``Chat.request`` makes it of :class:`RequestOptions`, which say what the fields are.

    messages: ``{"role", "content"}`` with text contents; an assistant's may have ``tool_calls`` (each
    ``{"id", "name", "arguments": dict}``) and ``reasoning_content``, which many templates leave out; a tool's
    ``tool_call_id`` and ``name``. Or a text that is a rendered prompt already.
    options: how it is blended; None: as the settings say.
    plan: the prompt, if it was planned already; the messages are then what the user said. sources: what was
    retrieved for it.
    """

    messages: Messages | str
    sampling: Sampling = field(default_factory=Sampling)
    documents: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str = AUTO
    parallel_tool_calls: bool = True
    schema: Mapping[str, Any] | None = None
    grammar: Grammar | Mapping[str, Any] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: BlendOptions | None = None
    max_retries: int = 1
    conversation: str | None = None
    plan: PromptPlan | None = None
    sources: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        names = [_tool_name(tool) for tool in self.tools]
        if self.tool_choice not in (AUTO, NONE, REQUIRED, *names):
            raise ConfigError(f"tool_choice {self.tool_choice!r} names no tool; there are {names}")
        if self.tool_choice == REQUIRED and not names:
            raise ConfigError("tool_choice 'required' needs tools")

    def within(self, room: int) -> Self:
        """Return the request with an answer of at most so many tokens, and of one at least: that a prompt
        leaves no room is the engine's to say."""
        most = max(1, min(self.sampling.max_tokens or room, room))
        return replace(self, sampling=replace(self.sampling, max_tokens=most))

    @property
    def forced(self) -> bool:
        """Return whether the answer has to be a tool call."""
        return self.tool_choice not in (AUTO, NONE)

    @property
    def held(self) -> bool:
        """Return whether a grammar holds the answer."""
        return self.forced or self.schema is not None or self.grammar is not None

    @property
    def offered(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the model may call."""
        return () if self.tool_choice == NONE else self.tools


def _tool_name(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    given = function if isinstance(function, Mapping) else {}
    if not isinstance(given.get("name"), str) or not isinstance(given.get("parameters") or {}, Mapping):
        raise ConfigError(
            f"a tool is {{'type': 'function', 'function': {{'name': ..., 'parameters': ...}}}}, not {tool!r}"
        )
    return str(given["name"])


def make_request(settings: Settings, messages: Messages | str, options: RequestOptions) -> ChatRequest:
    """Return the request that messages and options make, its texts encodable and its values plain data.

    Raises ConfigError for an unknown option, for a value that cannot be used, and where there is no message.
    """
    check_names(options, RequestOptions.__annotations__)
    if not isinstance(messages, Iterable):
        raise ConfigError(f"a prompt is a text, or messages, not {messages!r}")
    if not messages and not isinstance(messages, str):
        raise ConfigError("there is no message to answer")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    blending = {name: given[name] for name in BlendKeywords.__annotations__ if name in given}
    grammar = given.get("grammar")
    for name, (kind, least) in _NUMBERS.items():
        if name in given and not (isinstance(given[name], kind) and given[name] >= least):
            what = "a whole number" if kind is Integral else "a number"
            raise ConfigError(f"{name} has to be {what} of at least {least}, not {given[name]!r}")
    for name in ("schema", "grammar"):
        if not isinstance(given.get(name, {}), Mapping if name == "schema" else Mapping | Grammar):
            raise ConfigError(f"{name} has to be a JSON schema, not {given[name]!r}")
    if not isinstance(variables := given.get("chat_template_kwargs", {}), Mapping):
        raise ConfigError(f"chat_template_kwargs must be variables by name, not {variables!r}")
    if given.get("timeout", 0) > TIMEOUT_MAX:  # which no clock reaches
        del given["timeout"]
    sampling = Sampling(
        max_tokens=given.get("max_tokens", settings.max_tokens),
        temperature=given.get("temperature", settings.temperature),
        top_p=given.get("top_p", 1.0),
        stop=_texts("stop", given.get("stop", ())),
        seed=given.get("seed"),
        logprobs=given.get("logprobs"),
        timeout_s=given.get("timeout"),
        other=given.get("other", {}),
    )
    return ChatRequest(
        plain(messages) if isinstance(messages, str) else _messages(plain(messages)),
        sampling,
        documents=_texts("documents", given.get("documents", ())),
        tools=tuple(plain(given.get("tools", ()))),
        tool_choice=plain(given.get("tool_choice", AUTO)),
        parallel_tool_calls=given.get("parallel_tool_calls", True),
        schema=plain(given.get("schema")),
        grammar=plain(grammar) if isinstance(grammar, Mapping) else grammar,
        chat_template_kwargs={**settings.chat_template_kwargs, **variables},
        options=resolved(blending, settings.blending),
        max_retries=given.get("max_retries", 1),
        conversation=encodable(str(given["conversation"])) if "conversation" in given else None,
    )


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """Return one text, or several, of an option."""
    texts = (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{name} has to be texts, not {value!r}")
    return tuple(map(encodable, texts))


def _messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Return messages, each as :func:`_message`; what a user shows is refused as long as nobody answered."""
    read: list[dict[str, Any]] = []
    answered = False
    for message in reversed(messages):
        read.append(_message(message, refuse=not answered))
        answered = answered or (read[-1]["role"] == "assistant" and not read[-1].get("tool_calls"))
    return read[::-1]


def _message(message: Any, refuse: bool) -> dict[str, Any]:
    """Return a message with its texts in parts as one, and calls as name and arguments. Parts without text
    are left out, with a warning; or refused, of a user."""
    known = isinstance(message, dict) and isinstance(message.get("role"), str)
    if not known or ("content" not in message and message["role"] in ("developer", "system", "user")):
        raise ConfigError(f"a message is {{'role': ..., 'content': ...}}, not {message!r}")
    message = in_present_form(message)
    if message["role"] == "developer":
        message["role"] = "system"
    if isinstance(thought := message.pop("reasoning", None), str):
        message["reasoning_content"] = message.get("reasoning_content") or thought
    content = message.get("content")
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {"type": type(part).__name__} for part in content]
        texts = [part.get("text", part.get("refusal")) for part in parts]
        others = dict.fromkeys(
            (str(part.get("type")), part.get("reason"))
            for part, text in zip(parts, texts, strict=True)
            if not isinstance(text, str)
        )
        for kind, reason in others:
            if refuse and message["role"] == "user":
                why = reason or "this model reads text only"
                raise ConfigError(f"a message holds content of type {kind!r}; {why}")
            said = f"left out content of type {kind!r}: {reason or 'it has no text'}"
            warnings.warn(said, BlendragWarning, stacklevel=5)
        message = {**message, "content": "\n".join(text for text in texts if isinstance(text, str))}
    elif not isinstance(content, str | None):
        raise ConfigError(f"a message's content is text, not {content!r}")
    if calls := message.get("tool_calls"):
        message = {**message, "tool_calls": [_call(call) for call in calls]}
    return message


def in_present_form(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of OpenAI's with what it says beside its content as its content, if that is empty, and
    a call or a result in the former form of these, which have no ids but names, in the present one. Its parts
    are each of a kind then, or media; what a tool gave is JSON if it is neither text nor a list of parts."""
    message = dict(message)
    refusal, audio, call = (message.pop(name, None) for name in ("refusal", "audio", "function_call"))
    if message["role"] == "assistant" and not message.get("content"):
        beside = (refusal, audio.get("transcript") if isinstance(audio, dict) else None)
        message["content"] = next((said for said in beside if isinstance(said, str)), message.get("content"))
    if isinstance(call, dict) and not message.get("tool_calls"):
        message["tool_calls"] = [{"id": call.get("name"), "type": "function", "function": call}]
    if message["role"] == "function":
        message |= {"role": "tool", "tool_call_id": message.get("name")}
    content = message.get("content", "")
    if content is None and message["role"] != "assistant":
        message["content"] = ""
    elif isinstance(content, list) and (message["role"] != "tool" or _are_parts(content)):
        message["content"] = [*_parts(content)]
    elif message["role"] == "tool" and not isinstance(content, str):
        message["content"] = json.dumps(content, ensure_ascii=False, default=str)
    return message


def _are_parts(content: list[Any]) -> bool:
    """Return whether a list that a tool gave holds texts alone or some part of a message; else it is data."""
    keys = [one.keys() if isinstance(one, dict) else {type(one)} for one in content]
    return all(each <= _OF_TEXT for each in keys) or any(
        each <= _MEDIA or ("type" in each and isinstance(one["type"], str))
        for one, each in zip(content, keys, strict=True)
    )


_OF_TEXT = {str, "text", "annotations", "cache_control"}
_MEDIA = {"audio_url", "image_embeds", "image_pil", "image_url", "input_audio", "video_url"}


def _parts(content: list[Any]) -> Iterator[Any]:
    """Yield the parts of a message: texts alone, without a kind, or in a list of their own, as text."""
    for part in content:
        match part:
            case list():
                yield from _parts(part)
            case str():
                yield {"type": "text", "text": part}
            case {"text": str()} if "type" not in part:
                yield {"type": "text", **part}
            case _:
                yield part


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    given = {**call, **function} if isinstance(function, dict) else call if isinstance(call, dict) else {}
    arguments: Any = next((given[name] for name in ARGUMENTS if given.get(name)), {})
    if isinstance(arguments, str):
        try:
            written = json.loads(arguments)
        except ValueError:
            written = None
        arguments = written if isinstance(written, dict) else {}  # a model's mistake, which the result says
    if not isinstance(given.get("name"), str) or not isinstance(arguments, dict):
        raise ConfigError(f"a tool call is {{'name': ..., 'arguments': ...}}, not {call!r}")
    return {"id": given.get("id"), "name": given["name"], "arguments": arguments}


def check_variables(chat_template_kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError for what templates get from elsewhere, and for what says how to apply them."""
    if chat_template_kwargs:
        from transformers import PreTrainedTokenizerBase

        taken = {"messages", *signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
        for name in chat_template_kwargs:
            if not isinstance(name, str) or name in taken:
                raise ConfigError(f"chat_template_kwargs: {name!r} is no variable that a request may set")


def check_names(options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise ConfigError for an option that there is not, with the one that may be meant."""
    for name in [*options, *(options.get("other") or ())]:
        if name in RENAMED and (name in options or name != "top_k"):  # sampling's is one of the other ones
            raise ConfigError(RENAMED[name])
        if name in options and name not in known:
            raise ConfigError(f"unknown option {name!r}{closest(name, known)}")
