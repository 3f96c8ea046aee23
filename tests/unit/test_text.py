"""Texts and values of callers' programs: what becomes of those that no encoder takes."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from blendrag.chat.request import make_request
from blendrag.errors import ConfigError
from blendrag.settings import Settings
from blendrag.text import encodable, plain

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=20)  # surrogates, too
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | ANY_TEXT
    | st.dates()
    | st.decimals()
    | st.uuids(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=10,
)


class Colour(enum.StrEnum):
    RED = "r"


@dataclasses.dataclass
class Place:
    name: str


@given(st.text())
def test_a_text_that_can_be_encoded_stays_as_it_is(text: str) -> None:
    assert encodable(text) == text


@example("\ud835\udc65 \ud835")  # a pair's halves, and one alone
@given(ANY_TEXT)
def test_every_other_character_is_kept_in_its_place(text: str) -> None:
    found = encodable(text)
    found.encode()
    rest = iter(found)
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")  # pairs are characters
    assert all(next(rest) == ("\ufffd" if "\ud800" <= one <= "\udfff" else one) for one in whole)
    assert next(rest, None) is None


@given(VALUES)
def test_whatever_a_call_was_made_with_can_be_written(value: Any) -> None:
    json.dumps(plain(value), ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (datetime.date(2024, 1, 2), "2024-01-02"),
        (uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005"),
        (decimal.Decimal("1.10"), "1.10"),
        ({"a\ud800"}, ["a\ufffd"]),
        ((1, 2.5, None, True), [1, 2.5, None, True]),
        (Colour.RED, "r"),
        ({Colour.RED: Place("Turku")}, {"r": {"name": "Turku"}}),
        (Path("/tmp"), "/tmp"),
        (b"\xff", "_w=="),
        (type, str(type)),
    ],
)
def test_values_that_json_does_not_know_are_written(value: Any, written: Any) -> None:
    assert plain({"x": value}) == {"x": written}


def test_value_that_holds_itself_is_named() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ConfigError, match="holds itself"):
        plain(value)


@given(VALUES, ANY_TEXT)
def test_request_has_nothing_that_cannot_be_encoded(value: Any, text: str) -> None:
    tool = {"function": {"name": "f", "description": text}}
    call = {"name": text, "arguments": {text: value}}
    request = make_request(
        Settings.load(),
        [{"role": "user", "content": text, "tool_calls": [call]}],
        {
            "documents": [text],
            "stop": [text],
            "tools": [tool],
            "schema": {"title": text},
            "conversation": text,
        },
    )
    said = (request.messages, request.documents, request.sampling.stop, request.tools, request.schema)
    json.dumps([*said, request.conversation], ensure_ascii=False).encode()


@given(ANY_TEXT)
def test_setting_is_encodable(text: str) -> None:
    Settings.load(system_prompt=text, separator=text).system_prompt.encode()
