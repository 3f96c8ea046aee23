"""Calls in answers: where a call may begin, and how calls are read.

A model's own notation is read by vLLM's parser for it. What that finds nothing in, and the answer of a model
without one, is read as Hermes models write calls: JSON between ``<tool_call>`` tags; or JSON alone.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from blendrag.chat.request import ChatRequest
from blendrag.engine.client.tool_parser import ToolParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_JSON = json.JSONDecoder(strict=False)  # models write line ends into strings as they are
_BEGIN = re.compile(r"\s*(?=[{\[])")
_BEGUN = re.compile(r'\s*\[?\s*{\s*"name"\s*:\s*"([^"]*)"')
_END = re.compile(rf"[\s}}\]]*(?:{CLOSE})?")  # small models close once more than they opened
_REST = re.compile(rf"(.*?)(?:{CLOSE}|(?={OPEN})|\Z)", re.DOTALL)


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


def visible(text: str, request: ChatRequest, parser: ToolParser | None = None) -> str:
    """Return the beginning of an unfinished answer that is certainly text, and no part of a call."""
    if not request.offered or (parser is not None and parser.apart):
        return text
    marks = (OPEN,) if parser is None else parser.marks
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
        value = _parsed(text)
        return _sorted("", [_cut(text) if value is None else _call(value, names)])
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
        content = _prose(before, content)
    bare = _bare(listed, names)
    readings = [
        *(
            [_tagged(text, names)] if OPEN in marks else []
        ),  # whose parsers leave out what stands behind calls
        _sorted(content, found),
        *([] if OPEN in marks else [_bare(text, names)]),
        Reading(_prose(before, bare.text), bare.calls, bare.invalid),
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
    prose = _before(text, marks)
    call = InvalidToolCall(text[len(prose) :], "the model's tool parser finds no call in it")
    return Reading(prose, (), (call,)) if call.text else Reading(text)


def _prose(before: str, content: str) -> str:
    """Return the text before the calls, which some parsers leave out, and that behind them."""
    head = before.strip()
    _, known, behind = content.partition(head) if head else ("", head, content)
    behind = content if head and not known else behind
    return before + (behind if behind.strip() else "")


def _tagged(text: str, names: set[str]) -> Reading:
    """Read an answer with calls as Hermes models write them, or as JSON. What stands around calls is text."""
    if OPEN not in text:
        return _bare(text, names)
    end = text.index(OPEN)
    prose, read = text[:end], list[ToolCall | InvalidToolCall]()
    while (begin := text.find(OPEN, end)) >= 0:
        between = text[end:begin]
        prose += between if between.strip() else ""
        values, end = _values(text, begin + len(OPEN))
        read += [_call(value, names) for value in values]
        whole = values and not _BEGIN.match(text, end)
        rest = (_END if whole else _REST).match(text, end)
        assert rest, "both match anywhere"
        read += [] if whole else [_cut(rest[1])]
        end = rest.end()
    return _sorted(prose + (text[end:] if text[end:].strip() else ""), read)


def _bare(text: str, names: set[str]) -> Reading:
    """Read an answer that is a call, or several of them, as JSON; text may follow."""
    values, end = _values(text, 0)
    if values and all(isinstance(one, dict) and _is_name(one.get("name"), names) for one in values):
        rest, calls = text[end:].strip(), [_call(value, names) for value in values]
        return _sorted("", [*calls, _cut(rest)]) if rest.startswith(("{", "[")) else _sorted(rest, calls)
    begun = None if values else _BEGUN.match(text)
    return _sorted("", [_cut(text)]) if begun and begun[1] in names else Reading(text)


def _values(text: str, place: int) -> tuple[list[Any], int]:
    """Return the JSON objects that stand here, one after the other or in lists; and where they end."""
    values: list[Any] = []
    while begin := _BEGIN.match(text, place):
        try:
            value, place = _JSON.raw_decode(text, begin.end())
        except (ValueError, RecursionError):
            break
        values += value if isinstance(value, list) else [value]
    return values, place


def _sorted(text: str, read: Sequence[ToolCall | InvalidToolCall]) -> Reading:
    calls = tuple(one for one in read if isinstance(one, ToolCall))
    return Reading(text, calls, tuple(one for one in read if isinstance(one, InvalidToolCall)))


def _cut(written: str) -> InvalidToolCall:
    return InvalidToolCall(written.strip(), "not a JSON object (cut off by max_tokens?)")


def _call(value: Any, names: set[str]) -> ToolCall | InvalidToolCall:
    written = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict):
        return InvalidToolCall(written, "not a JSON object")
    return _call_of(value.get("name"), value.get("arguments", value.get("parameters", {})), written, names)


def _call_of(name: Any, arguments: Any, written: str, names: set[str]) -> ToolCall | InvalidToolCall:
    if arguments in (None, "", "null"):  # as some models say that there are none
        arguments = {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    if not _is_name(name, names):
        return InvalidToolCall(written, f"no tool is called {name!r}")
    if not isinstance(arguments, dict):
        return InvalidToolCall(written, "its arguments are not an object")
    return ToolCall(uuid.uuid4().hex[:9], name, arguments)


def _is_name(value: Any, names: set[str]) -> bool:
    return isinstance(value, str) and value in names


def _parsed(text: str) -> Any:
    try:
        return _JSON.decode(text)
    except (ValueError, RecursionError):
        return None
