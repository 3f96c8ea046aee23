"""Calls that are forced at vLLM's own route: what holds them, and who reads them. No engine is started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import jsonschema
import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.parser import ParserManager
from vllm.tool_parsers import ToolParserManager

from blendrag.chat.tools import forced_schema
from blendrag.engine.client.generation import Grammar
from blendrag.engine.compat.forced_calls import hold_forced_calls
from grammars import held

FILTER = {"type": "object", "additionalProperties": False}
COLOUR = {**FILTER, "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
SIZE = {**FILTER, "properties": {"size": {"enum": ["klein", "groß"]}}, "required": ["size"]}
BY = {"type": "object", "required": ["filter"]}
PAINT = {**BY, "properties": {"filter": {"$ref": "#/$defs/Filter"}}, "$defs": {"Filter": COLOUR}}
SCALE = {**BY, "properties": {"filter": {"$ref": "#/definitions/Filter"}}, "definitions": {"Filter": SIZE}}
TOOLS = [
    {"type": "function", "function": {"name": "paint", "parameters": PAINT}},
    {"type": "function", "function": {"name": "scale", "parameters": SCALE}},
    {"type": "function", "function": {"name": "clock"}},
]
ARGUMENTS = {"filter": {"size": "groß"}}
SCALED = [{"name": "scale", "parameters": ARGUMENTS}]
NAMED = {"type": "function", "function": {"name": "scale"}}


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """vLLM's parsers, as they were."""
    known = dict(ToolParserManager.tool_parsers)
    yield
    ToolParserManager.tool_parsers.clear()
    ToolParserManager.tool_parsers.update(known)


@pytest.fixture(scope="module")
def speaker(tokenizer: Any) -> Any:
    speaker = deepcopy(tokenizer)
    names = ("tool_call", "arg_key", "arg_value", "think")
    tokens = [f"<{slash}{name}>" for name in names for slash in ("", "/")]
    speaker.add_special_tokens({"additional_special_tokens": ["<|python_tag|>", "[TOOL_CALLS]", *tokens]})
    return speaker


def asked(name: str, speaker: Any, **body: Any) -> tuple[Any, Any]:
    """The parser of one request, and the request as it leaves for the engine."""
    kind = ParserManager.get_parser(tool_parser_name=name, enable_auto_tools=True)
    body = {
        "messages": [{"role": "user", "content": "?"}],
        "tools": deepcopy(TOOLS),
        "max_tokens": 100,
        **body,
    }
    request = ChatCompletionRequest(**body)
    assert kind is not None
    parser = kind(speaker, request.tools)
    return parser, parser.adjust_request(request)


def takes(request: Any, value: Any) -> bool:
    """By the very check that vLLM makes, and the engine's own grammar."""
    return held(Grammar("json", request.structured_outputs.json), json.dumps(value, ensure_ascii=False))


NAMES = ["hermes", "llama3_json", "mistral", "glm45", "qwen3_coder", "granite", "pythonic", "minimax_m2"]


@pytest.mark.parametrize("name", NAMES)
def test_forced_call_is_held_to_its_tools_schema(name: str, speaker: Any) -> None:
    hold_forced_calls(name, forced_schema)
    _, required = asked(name, speaker, tool_choice="required")
    assert takes(required, SCALED)
    assert takes(required, [{"name": "clock", "parameters": {}}])
    called = [{"name": "paint", "parameters": ARGUMENTS}], [{"name": "clock", "parameters": {}}] * 2
    for wrong in ([], *called):
        assert not takes(required, wrong)
    _, named = asked(name, speaker, tool_choice=NAMED)
    assert takes(named, ARGUMENTS) and not takes(named, {"filter": {"colour": "red"}})
    for free in ({}, {"parallel_tool_calls": False}, {"tool_choice": "none"}):
        _, auto = asked(name, speaker, **{"tool_choice": "auto", **free})
        assert auto.structured_outputs is None


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("name", NAMES)
def test_forced_call_is_read_as_a_call(name: str, choice: Any, streamed: bool, speaker: Any) -> None:
    hold_forced_calls(name, forced_schema)
    parser, request = asked(name, speaker, tool_choice=choice)
    text = json.dumps(ARGUMENTS if choice == NAMED else SCALED, ensure_ascii=False)
    if streamed:
        ids = speaker.encode(text, add_special_tokens=False)
        parts = [
            parser.parse_delta(speaker.decode([one]), [one], request, [1], finished=at == len(ids))
            for at, one in enumerate(ids, 1)
        ]
        calls = [call.function for part in parts if part for call in part.tool_calls or ()]
        content = "".join(part.content or "" for part in parts if part)
    else:
        _, content, calls = parser.parse(text, request, enable_auto_tools=True)
    assert not content
    assert "".join(call.name or "" for call in calls) == "scale"
    called = "".join(call.arguments or "" for call in calls)
    assert "groß" in called
    jsonschema.validate(json.loads(called), SCALE)


def test_half_of_a_surrogate_pair_in_a_forced_call_can_be_sent(speaker: Any) -> None:
    hold_forced_calls("hermes", forced_schema)
    parser, request = asked("hermes", speaker, tool_choice=NAMED)
    _, _, (call,) = parser.parse('{"filter": "\\ud83d \\ud83d\\ude42"}', request, enable_auto_tools=True)
    assert json.loads(call.arguments.encode()) == {"filter": "\ufffd 🙂"}


def test_tool_that_cannot_be_forced_is_the_clients_error(speaker: Any) -> None:
    hold_forced_calls("hermes", forced_schema)
    far = {"type": "function", "function": {"name": "far", "parameters": {"$ref": "https://example.com/x"}}}
    with pytest.raises(VLLMValidationError, match=r"tool 'far': it refers to 'https://example.com/x'"):
        asked("hermes", speaker, tools=[far], tool_choice="required")


def test_parser_that_takes_no_json_is_left_alone() -> None:
    before = ToolParserManager.get_tool_parser("openai")
    hold_forced_calls("openai", forced_schema)
    assert ToolParserManager.get_tool_parser("openai") is before


def test_forced_call_of_the_responses_route_is_held_to_its_tool(speaker: Any) -> None:
    hold_forced_calls("granite", forced_schema)
    kind = ParserManager.get_parser(tool_parser_name="granite", enable_auto_tools=True)
    tools = [{"type": "function", **deepcopy(tool["function"])} for tool in TOOLS[:2]]
    assert kind is not None
    for choice in ("required", {"type": "function", "name": "scale"}):
        request = ResponsesRequest(input="?", tools=tools, tool_choice=choice)
        request = kind(speaker, request.tools).adjust_request(request)
        assert takes(request, ARGUMENTS if choice != "required" else SCALED)
