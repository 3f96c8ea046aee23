"""Tool calls: how tools are shown to the model, how a call is forced, and how calls are read.

A template that knows tools writes them its own way. For one that does not, tools are described in the system
message and calls are written as Hermes models write them: JSON between ``<tool_call>`` tags. A call that is
forced is one JSON object, for every model.
"""

from __future__ import annotations

import json
import re
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import xxhash

from blendrag.chat.messages import Message
from blendrag.chat.request import REQUIRED, ChatRequest
from blendrag.chat.schema import JOINTS, OWN, Schemas, json_grammar
from blendrag.engine.client.generation import Grammar
from blendrag.engine.client.tool_parser import ToolParser
from blendrag.errors import BlendragWarning
from blendrag.prompt import render_chat

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{_OPEN}(.*?)(?:{_CLOSE}|\Z)", re.DOTALL)
_INTRODUCTION = (
    "You may call one or more functions. These are their signatures, a JSON object per line:\n"
    "<tools>\n{tools}\n</tools>\n"
    f'To call one, answer with\n{_OPEN}\n{{{{"name": <its name>, "arguments": <object>}}}}\n{_CLOSE}'
)

_UNSAID_TOKENS = 512  # for a call, where a client does not say how many it may take

_SCHEMA = "Answer with JSON that matches this schema, and nothing else:\n{schema}"

_EFFORT = {"reasoning_effort", "enable_thinking"}

_known: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
_facts: WeakKeyDictionary[Any, TemplateFacts] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. ``id`` is our own: models give none."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class InvalidToolCall:
    """Text that looks like a call and cannot be one."""

    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reading:
    """A model's answer, taken apart: what it says, and what it calls."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    invalid: tuple[InvalidToolCall, ...] = ()


def template_knows_tools(tokenizer: Any) -> bool:
    """Return whether the model's template writes tools, calls and their results by itself."""
    if tokenizer not in _known:
        tool = whole_tool({"function": {"name": "probe_a"}})
        call = {"type": "function", "function": {"name": "probe_b", "arguments": {}}}
        messages: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "probe0000", **call}]},
            {"role": "tool", "content": "probe_c", "name": "probe_b", "tool_call_id": "probe0000"},
        ]
        try:
            shown = render_chat(tokenizer, messages, tools=[tool])
        except Exception:  # templates fail in their own ways at what they do not know
            shown = ""
        _known[tokenizer] = all(f"probe_{letter}" in shown for letter in "abc")
    return _known[tokenizer]


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """Facts about a model's chat template. knows_tools: see :func:`template_knows_tools`. takes_system,
    takes_welcome: whether it takes a system message, and one of the assistant's to begin with.
    control_tokens: texts that mean something in its markup. names: those in its code, variables among them;
    None: a server of an older version, which does not say."""

    knows_tools: bool
    takes_system: bool
    takes_welcome: bool
    control_tokens: tuple[str, ...]
    names: tuple[str, ...] | None = None

    @classmethod
    def of(cls, tokenizer: Any) -> TemplateFacts:
        if tokenizer not in _facts:
            user = {"role": "user", "content": "?"}
            added = (token.content for token in tokenizer.added_tokens_decoder.values())
            _facts[tokenizer] = cls(
                template_knows_tools(tokenizer),
                _takes(tokenizer, {"role": "system", "content": "?"}, user),
                _takes(tokenizer, {"role": "assistant", "content": "?"}, user),
                tuple(one for one in added if any(map(str.isalpha, one))),
                _names(getattr(tokenizer, "chat_template", None)),
            )
        return _facts[tokenizer]


def _names(template: Any) -> tuple[str, ...]:
    """Return the names in the code of a template, or of several."""
    from jinja2 import Environment

    sources = template.values() if isinstance(template, Mapping) else [template or ""]
    lexed = (token for source in sources for token in Environment().lex(source))
    return tuple(sorted({value for _, kind, value in lexed if kind == "name"}))


def _takes(tokenizer: Any, *messages: Message) -> bool:
    try:
        render_chat(tokenizer, messages)
    except Exception:  # templates fail in their own ways at what they do not know
        return False
    return True


def with_tools(template: TemplateFacts, request: ChatRequest) -> tuple[list[Message], dict[str, Any]]:
    """Return the request's messages, with tools and calls as this model reads them, and options for its
    template."""
    _warn_about_variables(template, request.chat_template_kwargs)
    tokens = template.control_tokens
    messages = [dict(message) for message in request.messages if isinstance(message, Mapping)]
    if request.schema is not None:
        schema = json.dumps(request.schema, ensure_ascii=False)
        messages.insert(0, {"role": "system", "content": _SCHEMA.format(schema=schema)})
    if template.knows_tools:
        native = [_native(message) for message in messages]
        options = offered_tools(template, request) if request.offered else {}
        return [_harmless(tokens, message) for message in native], options
    messages = [_harmless(tokens, _written(message)) for message in messages]
    if request.offered:
        signatures = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in request.offered)
        messages.insert(0, {"role": "system", "content": _INTRODUCTION.format(tools=signatures)})
    return messages, {}


def forced_schema(
    tools: Sequence[Mapping[str, Any]], name: str | None, max_tokens: int | None
) -> Mapping[str, Any]:
    """Return the schema that vLLM's server takes for a forced call: the arguments of the tool that is
    named; or a list of one call. max_tokens: None for the rest of the window. Raises ConfigError as
    :func:`answer_grammar` does."""
    schemas = Schemas(max_tokens or _UNSAID_TOKENS)
    if name is not None:
        tool = next(tool for tool in tools if tool["function"]["name"] == name)
        return schemas.grammar(_arguments(schemas, tool)).value
    calls = [_call_schema(schemas, tool, "parameters") for tool in tools]
    return schemas.grammar({"type": "array", "items": {"anyOf": calls}, "minItems": 1, "maxItems": 1}).value


def _call_schema(schemas: Schemas, tool: Mapping[str, Any], arguments: str) -> dict[str, Any]:
    """Return the schema of a call, an object of the tool's name and, under the name ``arguments``, of
    those."""
    return {
        "type": "object",
        "properties": {"name": {"const": tool["function"]["name"]}, arguments: _arguments(schemas, tool)},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _arguments(schemas: Schemas, tool: Mapping[str, Any]) -> dict[str, Any]:
    return schemas.own(parameters_of(tool), f"the parameters of tool {tool['function']['name']!r}")


def offered_tools(template: TemplateFacts, request: ChatRequest) -> dict[str, Any]:
    """Return the variable ``tools`` of a template."""
    tools = [whole_tool(tool) for tool in request.offered]
    return {"tools": _harmless(template.control_tokens, tools)}


def parameters_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which are an object; if it says nothing of them, there are
    none."""
    given = dict(tool["function"].get("parameters") or {})
    given = {name: value for name, value in given.items() if value is not None}
    given.setdefault("type", "object")
    return given if given.keys() & {*JOINTS, *OWN} else {**given, "properties": {}}


def whole_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with all that templates ask for; what it has stays where it is."""
    function = {**tool["function"], "parameters": parameters_of(tool)}
    function.setdefault("description", "")
    return {"type": "function", **tool, "function": function}


def _warn_about_variables(template: TemplateFacts, given: Mapping[str, Any]) -> None:
    names = given.keys() if template.names is None else {*template.names}
    if "reasoning_effort" in given:  # enable_thinking goes along, for templates that have but that
        names |= _EFFORT if names & _EFFORT else {"enable_thinking"}
    for name in given.keys() - names:
        said = f"ignored {name}: the model's chat template has no such variable"
        warnings.warn(said, BlendragWarning, stacklevel=3)


def _native(message: Message) -> Message:
    message = dict(message)
    calls = [
        {
            "type": "function",
            "id": _short_id(call.get("id")),
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in message.pop("tool_calls", None) or ()
    ]
    if "tool_call_id" in message:
        message["tool_call_id"] = _short_id(message["tool_call_id"])
    return message | ({"tool_calls": calls} if calls else {})


def _short_id(call_id: str | None) -> str:
    """Return nine letters and digits, which is what Mistral's templates take; others take any."""
    known = call_id or ""
    return known if len(known) == 9 and known.isalnum() else xxhash.xxh3_64_hexdigest(known.encode())[:9]


def _harmless(control_tokens: Sequence[str], value: Any) -> Any:
    """Return ``value`` with the control tokens in its texts broken up by an invisible sign.

    Templates write tools, calls, names and thinking into their own markup, where control tokens count; what a
    user made a model call a tool with must not end a turn. Contents are kept apart already, and stay as they
    are.
    """
    if isinstance(value, Mapping):
        return {
            name: inner if name == "content" else _harmless(control_tokens, inner)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_harmless(control_tokens, inner) for inner in value]
    return without_control(control_tokens, value)


def without_control(control_tokens: Iterable[str], value: Any) -> Any:
    """Return a text with the control tokens in it broken up by an invisible sign; any other value as it
    is."""
    if isinstance(value, str):
        for token in control_tokens:
            value = value.replace(token, f"{token[0]}\u2060{token[1:]}")
    return value


def _written(message: Message) -> Message:
    """Return a message whose calls, or whose being a tool's result, are written out in its text."""
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        f"{_OPEN}\n{json.dumps({'name': call['name'], 'arguments': call['arguments']}, ensure_ascii=False)}\n"
        f"{_CLOSE}"
        for call in message.get("tool_calls") or ()
    ]
    written = {"role": message["role"], "content": "\n".join(filter(None, [content, *calls]))}
    thought = message.get("reasoning_content")
    return written | ({"reasoning_content": thought} if thought else {})


def answer_grammar(request: ChatRequest) -> Grammar | None:
    """Return what the answer has to match: the schema asked for; one call, a name and arguments; or the
    request's own grammar. Raises ConfigError for a schema that no answer can be held to."""
    if not request.forced and request.schema is None:
        own, most = request.grammar, request.sampling.max_tokens
        return json_grammar(own, most) if isinstance(own, Mapping) else own
    schemas = Schemas(request.sampling.max_tokens)
    wanted: list[dict[str, Any]] = []
    if not request.forced and request.schema is not None:  # an agent calls tools first, and answers then
        wanted.append(schemas.own(request.schema, "the schema"))
    for tool in request.offered:
        name = tool["function"]["name"]
        if not request.forced or request.tool_choice in (REQUIRED, name):
            wanted.append(_call_schema(schemas, tool, "arguments"))
    return schemas.grammar(*wanted)


def visible(text: str, request: ChatRequest, parser: ToolParser | None = None) -> str:
    """Return the beginning of an unfinished answer that is certainly text, and no part of a call."""
    if not request.offered or (parser is not None and parser.apart):
        return text
    marks = (_OPEN,) if parser is None else parser.marks
    if request.forced or marks is None or text.lstrip()[:1] in ("{", "[", ""):
        return ""
    marks = (*marks, *(parser.perhaps if parser else ()))
    before = _before(text, marks)
    if len(before) < len(text):
        return before
    held = (n for mark in marks for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n]))
    return text[: len(text) - max(held, default=0)]


def _before(text: str, marks: Iterable[str]) -> str:
    """Return what stands in a text before the first of the marks."""
    return text[: min((text.index(mark) for mark in marks if mark in text), default=len(text))]


def read_answer(
    text: str, request: ChatRequest, parser: ToolParser | None = None, token_ids: Sequence[int] = ()
) -> Reading:
    """Take a finished answer apart. parser: what reads its calls; what that one finds none in is read as
    without it, and nothing that looks like a call is lost. token_ids: of the answer, thinking included."""
    names = {tool["function"]["name"] for tool in request.offered}
    if not names:
        return Reading(text)
    if request.forced:
        return _reading("", [text], names)
    return _limited(_parsed_by(parser, text, token_ids, names) if parser else _tagged(text, names), request)


def read_calls(text: str, written: Sequence[tuple[str, str]], request: ChatRequest) -> Reading:
    """Return a finished answer whose calls a server has read. written: their names and arguments."""
    if not written:
        return read_answer(text, request)
    names = {tool["function"]["name"] for tool in request.offered}
    return _limited(_sorted(text, [_call_of(*call, " ".join(call), names) for call in written]), request)


def ended_by(reading: Reading, finish_reason: str) -> str:
    """Return "tool_calls" for an answer that calls tools, unless the last of its calls was cut."""
    cut = reading.invalid and finish_reason == "length"
    return "tool_calls" if reading.calls and not cut else finish_reason


def _limited(reading: Reading, request: ChatRequest) -> Reading:
    if request.parallel_tool_calls or not reading.calls:
        return reading
    return Reading(reading.text, reading.calls[:1])


def _parsed_by(parser: ToolParser, text: str, token_ids: Sequence[int], names: set[str]) -> Reading:
    marks = parser.marks or ()
    before = _before(text, (*marks, *parser.perhaps))
    rest = text[len(before) :]
    listed = rest[len(next((mark for mark in marks if rest.startswith(mark)), "")) :].strip()
    content, written = parser.read(text, token_ids)
    found = [_call_of(name, arguments, rest, names) for name, arguments in written]
    cut = listed.startswith("[") and not listed.endswith(("]", ">"))
    if written and (cut or parser.calls_in(text) > len(written)):
        found.append(InvalidToolCall(rest, "the model's tool parser cannot read all of it"))
    if parser.apart:
        content = text
    elif written and marks:
        content = _said(before, content)
    bare = _bare(listed, names)
    readings = [
        _sorted(content, found),
        (_tagged if _OPEN in marks else _bare)(text, names),
        Reading(_said(before, bare.text), bare.calls, bare.invalid),
    ]
    for good in (
        lambda reading: reading.calls and not reading.invalid,
        lambda reading: reading.calls,
        lambda reading: reading.invalid,
    ):
        if (reading := next(filter(good, readings), None)) is not None:
            return Reading(
                reading.text, reading.calls, tuple({one.text: one for one in reading.invalid}.values())
            )
    said = _before(text, marks)
    call = InvalidToolCall(text[len(said) :], "the model's tool parser finds no call in it")
    return Reading(said, (), (call,)) if call.text else Reading(text)


def _said(before: str, content: str) -> str:
    """Return the text before the calls, of which some parsers leave out blanks, or all; and that behind
    them."""
    head = before.strip()
    _, known, behind = content.partition(head) if head else ("", head, content)
    behind = content if head and not known else behind
    return before + (behind if behind.strip() else "")


def _tagged(text: str, names: set[str]) -> Reading:
    """Read an answer with calls as Hermes models write them, or as JSON."""
    if _OPEN in text:
        return _reading(text[: text.index(_OPEN)], _CALL.findall(text), names)
    return _bare(text, names)


def _bare(text: str, names: set[str]) -> Reading:
    """Read an answer that is a call, or a list of them, as JSON."""
    value = _parsed(text)
    objects = value if isinstance(value, list) else [value]
    if objects and all(isinstance(one, dict) and _is_name(one.get("name"), names) for one in objects):
        return _reading("", [json.dumps(one) for one in objects], names)
    return Reading(text)


def _reading(text: str, written: Sequence[str], names: set[str]) -> Reading:
    return _sorted(text, [_call(one.strip(), names) for one in written])


def _sorted(text: str, read: Sequence[ToolCall | InvalidToolCall]) -> Reading:
    calls = tuple(one for one in read if isinstance(one, ToolCall))
    return Reading(text, calls, tuple(one for one in read if isinstance(one, InvalidToolCall)))


def _call(written: str, names: set[str]) -> ToolCall | InvalidToolCall:
    value = _parsed(written)
    if not isinstance(value, dict):
        return InvalidToolCall(written, "not a JSON object (cut off by max_tokens?)")
    return _call_of(value.get("name"), value.get("arguments", value.get("parameters", {})), written, names)


def _call_of(name: Any, arguments: Any, written: str, names: set[str]) -> ToolCall | InvalidToolCall:
    if isinstance(arguments, str):
        arguments = _parsed(arguments or "{}")
    if not _is_name(name, names):
        return InvalidToolCall(written, f"no tool is called {name!r}")
    if not isinstance(arguments, dict):
        return InvalidToolCall(written, "its arguments are not an object")
    return ToolCall(uuid.uuid4().hex[:9], name, arguments)


def _is_name(value: Any, names: set[str]) -> bool:
    return isinstance(value, str) and value in names


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
