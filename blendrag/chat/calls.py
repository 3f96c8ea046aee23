"""Calls in answers: where a call may begin, and how calls are read.

JSON is read as Hermes models write calls, between ``<tool_call>`` tags or behind another family's mark; or
alone. Any other notation is read by vLLM's parser for it.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blendrag.chat.request import ARGUMENTS, ChatRequest
from blendrag.engine.client.tool_parser import ToolParser
from blendrag.errors import ConfigError
from blendrag.text import plain

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_JSON = json.JSONDecoder(strict=False)  # models write line ends into strings as they are
_BEGIN = re.compile(r"[\s,;\[\]}]*(?={)")  # of a call, also in a list; small models close it once too often
_ENDED = re.compile(r"\A[\s\]}]*(?:[,;]\s*\Z)?")  # what else ends a call, or the last of several
_BEGUN = re.compile(
    r'[\s\[]*{\s*(?:"type"\s*:\s*"function"\s*,\s*"function"\s*:\s*{\s*)?"name"\s*:\s*"([^"]*)"'
)
_PYTHON = re.compile(r"\s*\[\s*(\w+)\((?![\s\S]*\)\s*]\s*[^\s\[])")  # a list, and no text behind it
# What begins otherwise is no call without a mark: JSON, or Python's.
_MAYBE = re.compile(r'[\s,;\[\]}]*(?:{\s*(?:"|\Z)|\Z)|\s*\[\s*[\w.]*(?:\(|\Z)')
# Behind a tag a call follows; where words do, prose only mentions the tag: unless it is closed, and they
# begin at once, or in the next line. Until an answer ends, that may yet be, and a word become a tool's name.
_CLOSED = rf"[\w\n](?:(?!{OPEN})[\s\S])*?{CLOSE}"
_PERHAPS = r"[\w\n]|\s*\w\S*\Z"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. ``id`` is our own: models give none."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class InvalidToolCall:
    """Text that looks like a call and cannot be one. ``call``: what it would be, if it only names a tool that
    there is not."""

    text: str
    reason: str
    call: ToolCall | None = None


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
    if request.forced or (parser is not None and parser.marks is None) or _MAYBE.match(text):
        return ""
    names = _names(request)
    more = parser.perhaps if parser else ()
    kinds = (_marks(one, names, *more, words=_PERHAPS).search(text) for one in dict.fromkeys((parser, None)))
    if begun := [begin.start() for begin in kinds if begin]:
        return text[: min(begun)]
    marks = (OPEN, *((parser.marks or ()) if parser else ()), *more)
    held = (n for mark in marks for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n]))
    return text[: len(text) - max(held, default=0)]


def _names(request: ChatRequest) -> list[str]:
    return [tool["function"]["name"] for tool in request.offered]


def _marks(
    parser: ToolParser | None, names: Sequence[str], *more: str, words: str = _CLOSED
) -> re.Pattern[str]:
    """Return what matches where a call begins, or with one of ``more`` texts. words: those that may follow a
    tag, beside the tools' names."""
    marks, tagged = ((OPEN,), True) if parser is None else (parser.marks or (), not parser.end)
    known = "|".join(re.escape(name) for name in names if re.fullmatch(r"\w\S*", name)) or "(?!)"
    call = rf"(?=\s*(?:[{{\[<'\"`]|\Z|(?:{known})(?!\w))|{words})"
    found = [re.escape(mark) + (call if tagged and mark == OPEN else "") for mark in marks]
    return re.compile("|".join([*found, *map(re.escape, more)]) or "(?!)")


def read_answer(
    text: str,
    request: ChatRequest,
    parser: ToolParser | None = None,
    token_ids: Sequence[int] = (),
    *,
    cut: bool = False,
) -> Reading:
    """Take a finished answer apart. parser: what reads its calls; what that one finds none in is read as
    without it, and nothing that looks like a call is lost. token_ids: of the answer, thinking included. cut:
    it was cut off, so a call that does not end is not whole."""
    names = _names(request)
    if not names:
        return Reading(text)
    if request.forced:
        value = _parsed(text)
        return _sorted("", [_cut(text) if value is None else _call(value, text, names)])
    if parser is None:
        return _limited(_tagged(text, names, _marks(None, names)), request)
    return _limited(_parsed_by(parser, text, token_ids, names, cut), request)


def read_calls(text: str, written: Sequence[tuple[str, str]], request: ChatRequest) -> Reading:
    """Return a finished answer whose calls a server has read. written: their names and arguments."""
    if not written:
        return read_answer(text, request)
    names = _names(request)
    return _limited(_sorted(text, [_call_of(*call, " ".join(call), names) for call in written]), request)


def ended_by(reading: Reading, finish_reason: str) -> str:
    """Return "tool_calls" for an answer that calls tools, unless the last of its calls was cut."""
    cut = reading.invalid and finish_reason == "length"
    return "tool_calls" if reading.calls and not cut else finish_reason


def _limited(reading: Reading, request: ChatRequest) -> Reading:
    if request.parallel_tool_calls:
        return reading
    return Reading(reading.text, reading.calls[:1], () if reading.calls else reading.invalid[:1])


def _parsed_by(
    parser: ToolParser, text: str, token_ids: Sequence[int], names: Sequence[str], cut: bool
) -> Reading:
    marks = _marks(parser, names)
    if cut and parser.end:
        ended = text.rfind(parser.end) + len(parser.end) if parser.end in text else 0
        ends = re.compile(f"(?:{_marks(parser, names, *parser.each).pattern})(?!{_BEGIN.pattern})")
        if begin := ends.search(text, ended):  # what is JSON shows by itself whether it is whole
            read = _parsed_by(parser, text[: begin.start()], (), names, False)
            half = InvalidToolCall(text[begin.start() :], "cut off by max_tokens")
            return Reading(read.text, read.calls, (*read.invalid, half))
    as_json = re.search(f"(?:{marks.pattern}){_BEGIN.pattern}", text)
    if as_json and not parser.end:
        return _tagged(text, names, marks)
    begin = _marks(parser, names, *parser.perhaps).search(text)
    start = begin.start() if begin else len(text)
    before, rest = text[:start], text[start:]
    content, written = parser.read(text, token_ids)
    own = _marks(None, names)  # that tools are described with, where a template knows none
    described = None if parser.apart or marks.search(text) else own.search(text)
    if described and described.start() < start and (parser.perhaps or not written):
        read = _tagged(text, names, own)
        if read.calls:  # without one, the tag is only mentioned
            return read
    found = [_call_of(name, arguments, rest, names) for name, arguments in written]
    if as_json and not any(isinstance(one, ToolCall) for one in found):
        return _tagged(text, names, marks)
    if parser.apart:
        content = text
    elif written and parser.marks:
        content = _prose(before, content)
    reason = "the model's tool parser cannot read it"
    if unread := marks.search(content):
        found.append(InvalidToolCall(content[unread.start() :], reason))
        content = content[: unread.start()]
    elif written and parser.calls_in(text) > len(written):
        found.append(InvalidToolCall(rest, reason))
    # Of JSON alone, the parser may leave out what stands behind it.
    bare = _bare(rest, names)
    alone = (_bare(text, names), Reading(_prose(before, bare.text), bare.calls, bare.invalid))
    readings = [*(one for one in alone if not marks.search(one.text)), _sorted(content, found)]
    best = max(
        readings[:: -1 if parser.apart else 1],
        key=lambda one: (bool(one.calls and not one.invalid), len(one.calls), bool(one.invalid)),
    )
    return Reading(best.text, best.calls, tuple({one.text: one for one in best.invalid}.values()))


def _prose(before: str, content: str) -> str:
    """Return the text before the calls, which some parsers leave out, and that behind them."""
    head = before.strip()
    _, known, behind = content.partition(head) if head else ("", head, content)
    behind = content if head and not known else behind
    return before + (behind if behind.strip() else "")


def _tagged(text: str, names: Sequence[str], marks: re.Pattern[str]) -> Reading:
    """Read an answer with calls as JSON behind marks, or alone. What stands around calls is text."""
    if not (begin := marks.search(text)):
        return _bare(text, names)
    end = begin.start()
    prose, read = text[:end], list[ToolCall | InvalidToolCall]()
    while begin := marks.search(text, end):
        between = text[end : begin.start()]
        prose += between if between.strip() else ""
        values, end = _values(text, begin.end())
        read += [_call(*one, names) for one in values]
        whole, close = values and not _BEGIN.match(text, end), f"</{re.escape(begin[0][1:])}"
        behind = rf"[\s}}\]]*(?:{close}|</?\w*\Z)?" if whole else rf"(.*?)(?:{close}|(?={marks.pattern})|\Z)"
        rest = re.compile(behind, re.DOTALL).match(text, end)
        assert rest, "both match anywhere"
        read += [] if whole else [_cut(rest[1])]
        end = rest.end()
    return _sorted(prose + (text[end:] if text[end:].strip() else ""), read)


def _bare(text: str, names: Sequence[str]) -> Reading:
    """Read an answer that is a call, or several of them, as JSON; text may follow."""
    values, end = _values(text, 0)
    if values and all(_function(one).get("name") in names for one, _ in values):
        calls = [_call(*one, names) for one in values]
        if _BEGIN.match(text, end):
            return _sorted("", [*calls, _cut(text[end:])])
        return _sorted(_ENDED.sub("", text[end:], 1).strip(), calls)
    begun, python = None if values else _BEGUN.match(text), _PYTHON.match(text)
    if python and python[1] in names:
        reason = "calls in Python's notation: cut off by max_tokens, or not this model's"
        return _sorted("", [InvalidToolCall(text.strip(), reason)])
    return _sorted("", [_cut(text)]) if begun and begun[1] in names else Reading(text)


def _values(text: str, place: int) -> tuple[list[tuple[dict[str, Any], str]], int]:
    """Return the JSON objects that stand here, one after the other or in lists, each with its text; and where
    they end."""
    values: list[tuple[dict[str, Any], str]] = []
    while begin := _BEGIN.match(text, place):
        try:
            value, place = _JSON.raw_decode(text, begin.end())
        except (ValueError, RecursionError):
            break
        values.append((value, text[begin.end() : place]))
    return values, place


def _sorted(text: str, read: Sequence[ToolCall | InvalidToolCall]) -> Reading:
    calls = tuple(one for one in read if isinstance(one, ToolCall))
    return Reading(text, calls, tuple(one for one in read if isinstance(one, InvalidToolCall)))


def _cut(written: str) -> InvalidToolCall:
    return InvalidToolCall(written.strip().lstrip(",; \n"), "not a JSON object (cut off by max_tokens?)")


def _call(value: Any, written: str, names: Sequence[str]) -> ToolCall | InvalidToolCall:
    if not isinstance(value, dict):
        return InvalidToolCall(written, "not a JSON object")
    value = _function(value)
    found = [value[key] for key in ARGUMENTS if key in value]
    if not found and value.keys() - {"name", "type", "id"}:
        return InvalidToolCall(written, "it has no arguments, and more than a name")
    return _call_of(value.get("name"), found[0] if found else {}, written, names)


def _function(value: dict[str, Any]) -> dict[str, Any]:
    """Return what a call calls, also of one in OpenAI's form."""
    return value["function"] if isinstance(value.get("function"), dict) else value


def _call_of(name: Any, arguments: Any, written: str, names: Sequence[str]) -> ToolCall | InvalidToolCall:
    if arguments in (None, "", "null"):  # as some models say that there are none
        arguments = {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    if not isinstance(name, str):
        return InvalidToolCall(written, f"no tool is called {name!r}")
    if not isinstance(arguments, dict):
        return InvalidToolCall(written, "its arguments are not an object")
    try:
        arguments = plain(arguments)
        json.dumps(arguments, allow_nan=False)
    except (ConfigError, ValueError, RecursionError):
        return InvalidToolCall(written, "its arguments cannot be written as JSON")
    call = ToolCall(uuid.uuid4().hex[:9], name, arguments)
    return call if name in names else InvalidToolCall(written, f"no tool is called {name!r}", call)


def _parsed(text: str) -> Any:
    try:
        return _JSON.decode(text)
    except (ValueError, RecursionError):
        return None
