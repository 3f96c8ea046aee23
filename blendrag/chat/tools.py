"""Tools in prompts: how tools are shown to the model, and how a call is forced.

A template that knows tools writes them its own way. For one that does not, tools are described in the system
message and calls are written as Hermes models write them: JSON between ``<tool_call>`` tags. A call that is
forced is one JSON object, for every model.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import xxhash

from blendrag.chat.calls import CLOSE, OPEN
from blendrag.chat.calls import ToolCall as ToolCall  # programs have it from here, too
from blendrag.chat.messages import Message, fit_template, merge_runs
from blendrag.chat.request import REQUIRED, ChatRequest
from blendrag.chat.schema import JOINTS, OWN, Schemas, json_grammar
from blendrag.engine.client.generation import Grammar
from blendrag.errors import BlendragWarning, ModelError
from blendrag.prompt import passed_over, render_chat
from blendrag.prompt.template import control_tokens

_INTRODUCTION = (
    "You may call one or more functions. These are their signatures, a JSON object per line:\n"
    "<tools>\n{tools}\n</tools>\n"
    f'To call one, answer with\n{OPEN}\n{{{{"name": <its name>, "arguments": <object>}}}}\n{CLOSE}'
)

_UNSAID_TOKENS = 512  # for a call, where a client does not say how many it may take

_SCHEMA = "Answer with JSON that matches this schema, and nothing else:\n{schema}"

_EFFORT = {"reasoning_effort", "enable_thinking"}

_NAMING = "<|tool_call_argument_begin|>"  # of Kimi's, which is shown calls by ids that name the tool

_PROBED = {"function": {"name": "probe_a"}}

_facts: WeakKeyDictionary[Any, TemplateFacts] = WeakKeyDictionary()


def template_knows_tools(tokenizer: Any) -> bool:
    """Return whether the model's template writes tools, calls and their results by itself."""
    try:
        shown = render_chat(tokenizer, _probe(1), tools=[whole_tool(_PROBED)])
    except ModelError:
        return False
    return all(f"probe_{letter}" in shown for letter in "abc")


def _probe(calls: int) -> list[Message]:
    """Return a conversation in which so many tools are called at once."""
    ids = [f"probe000{number}" for number in range(calls)]
    made = [{"type": "function", "id": i, "function": {"name": "probe_b", "arguments": {}}} for i in ids]
    results = [{"role": "tool", "content": "probe_c", "name": "probe_b", "tool_call_id": i} for i in ids]
    user = {"role": "user", "content": "?"}
    return [user, {"role": "assistant", "content": "", "tool_calls": made}, *results]


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """Facts about a model's chat template. knows_tools: see :func:`template_knows_tools`. takes_system,
    takes_welcome: whether it takes a system message, and one of the assistant's to begin with; takes_later: a
    system message behind others; takes_calls: several in one message. control_tokens: texts that mean
    something in its markup. names: those in its code, variables among them; None: a server of an older
    version, which does not say."""

    knows_tools: bool
    takes_system: bool
    takes_welcome: bool
    control_tokens: tuple[str, ...]
    names: tuple[str, ...] | None = None
    takes_later: bool = True
    takes_calls: bool = True

    @classmethod
    def of(cls, tokenizer: Any) -> TemplateFacts:
        if tokenizer not in _facts:
            user, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "?"}
            system = {"role": "system", "content": "?"}
            _facts[tokenizer] = cls(
                template_knows_tools(tokenizer),
                _takes(tokenizer, system, user),
                _takes(tokenizer, answer, user),
                tuple(control_tokens(tokenizer).values()),
                _names(getattr(tokenizer, "chat_template", None)),
                _takes(tokenizer, user, answer, system, user),
                _takes(tokenizer, *_probe(2), tools=[whole_tool(_PROBED)]),
            )
        return _facts[tokenizer]


def _names(template: Any) -> tuple[str, ...]:
    """Return the names in the code of a template, or of several."""
    from jinja2 import Environment

    sources = template.values() if isinstance(template, Mapping) else [template or ""]
    lexed = (token for source in sources for token in Environment().lex(source))
    return tuple(sorted({value for _, kind, value in lexed if kind == "name"}))


def _takes(tokenizer: Any, *messages: Message, **options: Any) -> bool:
    try:
        return not passed_over(tokenizer, messages, **options)
    except ModelError:
        return False


def with_tools(template: TemplateFacts, request: ChatRequest) -> tuple[list[Message], dict[str, Any]]:
    """Return messages, with tools and calls as this model reads them, and its template's options."""
    _warn_about_variables(template, request.chat_template_kwargs)
    tokens = template.control_tokens
    messages = [dict(message) for message in request.messages if isinstance(message, Mapping)]
    if request.schema is not None:
        schema = json.dumps(request.schema, ensure_ascii=False)
        messages.insert(0, {"role": "system", "content": _SCHEMA.format(schema=schema)})
    if template.knows_tools:
        native = _native(template, merge_runs(messages))
        options = offered_tools(template, request) if request.offered else {}
        return [_harmless(tokens, message) for message in native], options
    messages = [_harmless(tokens, _written(message)) for message in messages]
    if request.offered:
        signatures = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in request.offered)
        messages.insert(0, {"role": "system", "content": _INTRODUCTION.format(tools=signatures)})
    return messages, {}


def templated(tokenizer: Any, request: ChatRequest) -> tuple[list[Message], dict[str, Any]]:
    """Return messages in a form that the model's template takes, with tools and calls as this model reads
    them, and all of its template's options. Raises ModelError if the template takes no form of them."""
    messages, options = with_tools(TemplateFacts.of(tokenizer), request)
    options |= request.chat_template_kwargs
    return fit_template(tokenizer, messages, **options), options


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
    """Return the schema of a call: the tool's name and, called ``arguments``, its arguments."""
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
    """Return the schema of a tool's arguments, an object; if it says nothing, there are none."""
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
        message = f"ignored {name}: the model's chat template has no such variable"
        warnings.warn(message, BlendragWarning, stacklevel=3)


def _native(template: TemplateFacts, messages: Iterable[Message]) -> list[Message]:
    """Return messages with calls, their results and thinking as the template takes them."""
    by_name = _NAMING in template.control_tokens
    thinking = {"reasoning", "thinking"} & {*(template.names or ())}
    ids, numbers, made = dict[str | None, str](), count(), list[Message]()
    for message in map(dict, messages):
        calls = []
        for call in message.pop("tool_calls", None) or ():
            named = f"functions.{call['name']}:{next(numbers)}" if by_name else _short_id(call.get("id"))
            ids[call.get("id")] = named
            function = {"name": call["name"], "arguments": call["arguments"]}
            calls.append({"type": "function", "id": named, "function": function})
        if calls:
            message["tool_calls"] = calls
        elif "tool_call_id" in message:
            called = message["tool_call_id"]
            message["tool_call_id"] = ids.get(called) or _short_id(called)
        thought = message.get("reasoning_content")
        if thought and not (calls and message.get("content")):  # which gpt-oss does not take together
            message |= dict.fromkeys(thinking, thought)
        made.append(message)
    return made


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
    """Return a text with its control tokens broken up by an invisible sign; other values as they are."""
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
        f"{OPEN}\n{json.dumps({'name': call['name'], 'arguments': call['arguments']}, ensure_ascii=False)}\n"
        f"{CLOSE}"
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
