"""Answers that are held to a JSON schema, and end before their tokens do."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from blendrag.engine.client.generation import Grammar

# Few answers have fewer characters to a token.
_CHARACTERS_PER_TOKEN = 2
_LEAST_CHARACTERS = 16
_DECIDED = ("maxLength", "enum", "const", "pattern", "format")
_VALUES = ("default", "examples", "enum", "const")  # no schemas, though they may look like some


# JSON as models have mostly read it. White space of their own choice is where small ones lose themselves.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_grammar(schema: Mapping[str, Any], max_tokens: int | None) -> Grammar:
    """The grammar of answers that match ``schema`` within ``max_tokens``; None: however long."""
    return Grammar("json", {**with_room(schema, max_tokens), "x-guidance": _LAYOUT})


def with_room(schema: Mapping[str, Any], max_tokens: int | None) -> dict[str, Any]:
    """The schema, closed: what it names is all there is, and open strings share ``max_tokens`` equally.

    Small models add properties, and go on with a string, until ``max_tokens`` cuts them off; what is left is
    no JSON. Objects that name no properties, or say what others may be, stay as they are.
    """
    closed: dict[str, Any] = copy.deepcopy(dict(schema))
    parts = list(_parts(closed))
    halves = {id(half) for part in parts for half in _halves(part)}
    for part in parts:
        if part.get("type") == "object" and "properties" in part and id(part) not in halves:
            part.setdefault("additionalProperties", False)
    if max_tokens is None:
        return closed
    strings = [p for p in parts if p.get("type") == "string" and not any(name in p for name in _DECIDED)]
    share = _CHARACTERS_PER_TOKEN * max_tokens // max(1, len(strings))
    for string in strings:
        string["maxLength"] = max(_LEAST_CHARACTERS, share, string.get("minLength", 0))
    return closed


def _halves(part: dict[str, Any]) -> list[Any]:
    """Schemas that an object has to match together: closed each, they would leave it nothing."""
    together = part.get("allOf")
    return together if isinstance(together, list) else []


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a schema: the schemas in it, and some that are none."""
    if isinstance(value, list):
        for inner in value:
            yield from _parts(inner)
    elif isinstance(value, dict):
        yield value
        for name, inner in value.items():
            if name not in _VALUES:
                yield from _parts(inner)
