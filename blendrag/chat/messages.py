"""Messages as the model's chat template takes them.

Templates differ in what they allow: some refuse a system message, or one behind others, some want user and
assistant to alternate, or one call at a time, most know no tool messages. What a template refuses, or passes
over, is put into a message that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product, takewhile
from operator import itemgetter
from typing import Any

from blendrag.errors import ModelError
from blendrag.prompt import Messages, passed_over

Message = dict[str, Any]


def merge_runs(messages: Messages) -> list[Message]:
    """Merge messages of the same role in a row into one, a line each; tool messages stay apart."""
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last is None or last["role"] != message["role"] or message["role"] == "tool":
            merged.append(dict(message))
            continue
        content, thought = (
            "\n".join(filter(None, (last.get(name), message.get(name))))
            for name in ("content", "reasoning_content")
        )
        last |= {"content": content} | ({"reasoning_content": thought} if thought else {})
        if calls := [*(last.get("tool_calls") or ()), *(message.get("tool_calls") or ())]:
            last["tool_calls"] = calls
    return merged


def fit_template(tokenizer: Any, messages: Messages, /, **template_options: Any) -> list[Message]:
    """Return messages merged in the form that loses fewest contents. Raises ModelError if none is taken."""
    tried: list[list[Message]] = []
    taken: list[tuple[int, list[Message]]] = []
    errors: list[ModelError] = []
    for calls, roles in (*product(_CALLS, _ROLES), (list, _user_first)):
        fitted = merge_runs(calls(merge_runs(roles(merge_runs(messages)))))
        if fitted in tried:
            continue
        tried.append(fitted)
        try:
            lost = passed_over(tokenizer, fitted, **template_options)
        except ModelError as error:
            errors.append(error)
            continue
        if not lost:
            return fitted
        taken.append((lost, fitted))
    if not taken:
        said = [{**message, "content": message.get("content") or ""} for message in messages]
        if said == list(messages):
            raise errors[0]
        return fit_template(tokenizer, said, **template_options)  # some fail at a call without content
    return min(taken, key=itemgetter(0))[1]


def with_roles(messages: Messages, *, system: bool, later: bool, welcome: bool, calls: bool) -> list[Message]:
    """Return merged messages for a template of which it is known whether it takes a system message, one that
    comes later, one of the assistant's to begin with, and several calls in one message."""
    fitted = merge_runs(messages) if calls else _one_call_each(merge_runs(messages))
    if not (system and later):
        fitted = merge_runs((_later_system_in_user if system else _system_in_user)(fitted))
    opening = next((message["role"] for message in fitted if message["role"] != "system"), "user")
    return fitted if welcome or opening == "user" else merge_runs(_user_first(fitted))


def _later_system_in_user(messages: list[Message]) -> list[Message]:
    """Return system messages behind the first message as user messages."""
    return [*messages[:1], *_system_in_user(messages[1:])]


def _system_in_user(messages: list[Message]) -> list[Message]:
    """Return system messages as user messages, so that they merge with what the user says next."""
    return [{**message, "role": "user"} if message["role"] == "system" else message for message in messages]


def _user_first(messages: list[Message]) -> list[Message]:
    """Return messages with system ones and all roles but the assistant's given to the user, who begins."""
    turns = [
        message if message["role"] == "assistant" else {"role": "user", "content": message.get("content")}
        for message in messages
    ]
    return turns if turns and turns[0]["role"] == "user" else [{"role": "user", "content": "…"}, *turns]


def _one_call_each(messages: list[Message]) -> list[Message]:
    """Return calls of one message as those of several messages, each followed by its result."""
    made, rest = list[Message](), list(messages)
    while rest:
        message = rest.pop(0)
        if len(calls := message.get("tool_calls") or ()) < 2:
            made.append(message)
            continue
        results = list(takewhile(lambda one: one["role"] == "tool", rest))
        del rest[: len(results)]
        for call in calls:
            own = [one for one in results if one.get("tool_call_id") == call.get("id")]
            results = [one for one in results if one not in own]
            made += [{**message, "tool_calls": [call]}, *own]
            message = {"role": message["role"], "content": ""}
        made += results
    return made


def _answered(messages: list[Message]) -> list[Message]:
    """Return messages with an answer between a tool's result and what the user says next."""
    made = list[Message]()
    for message in messages:
        if message["role"] == "user" and made and made[-1]["role"] == "tool":
            made.append({"role": "assistant", "content": "…"})
        made.append(message)
    return made


_Form = Callable[[list[Message]], list[Message]]
_ROLES: Iterable[_Form] = (list, _later_system_in_user, _system_in_user)
_CALLS: Iterable[_Form] = (list, _one_call_each, _answered)
