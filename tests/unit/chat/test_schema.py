"""Schemas that an answer can fulfil within its tokens."""

from __future__ import annotations

import copy
from typing import Any

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.chat.schema import json_grammar, with_room

JOKE = {
    "type": "object",
    "properties": {"setup": {"type": "string"}, "punchline": {"type": "string"}},
    "required": ["setup", "punchline"],
}


def test_open_strings_may_use_up_all_tokens() -> None:
    held = with_room(JOKE, 100)
    assert [held["properties"][name]["maxLength"] for name in ("setup", "punchline")] == [100, 100]


@pytest.mark.parametrize(
    "string", [{"maxLength": 3}, {"enum": ["a"]}, {"const": "a"}, {"pattern": "a+"}, {"format": "date"}]
)
def test_string_that_is_decided_is_decided_again(string: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"s": {"type": "string", **string}}}
    assert with_room(schema, 100)["properties"]["s"] == {"type": "string", **string}


def test_unnamed_properties_go_on_for_ever() -> None:
    assert with_room(JOKE, 100)["additionalProperties"] is False


@pytest.mark.parametrize(
    "free", [{"type": "object"}, {"type": "object", "properties": {}, "additionalProperties": True}]
)
def test_object_that_is_meant_to_be_free_is_closed(free: dict[str, Any]) -> None:
    assert with_room(free, 100) == free


def test_properties_named_like_keywords_are_taken_for_them() -> None:
    names = {"type": {"type": "integer"}, "properties": {"type": "string"}, "enum": {"type": "boolean"}}
    held = with_room({"type": "object", "properties": names}, 10)
    assert set(held["properties"]) == set(names)
    assert held["properties"]["properties"]["maxLength"] == 20


def test_halves_of_one_object_exclude_each_other() -> None:
    half = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert with_room({"allOf": [half, {**half}]}, 10) == {"allOf": [half, half]}


def test_schema_given_is_changed() -> None:
    before = copy.deepcopy(JOKE)
    with_room(JOKE, 1)
    assert before == JOKE


schemas = st.recursive(
    st.sampled_from([{"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"enum": ["a", "b"]}]),
    lambda inner: (
        st.builds(lambda items: {"type": "array", "items": items}, inner)
        | st.builds(
            lambda properties: {"type": "object", "properties": properties, "required": list(properties)},
            st.dictionaries(st.sampled_from(["a", "type", "default", "properties", "ü"]), inner, max_size=3),
        )
        | st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner)
    ),
    max_leaves=8,
)


@given(schemas, st.integers(1, 4096))
def test_engine_refuses_the_schema_that_is_made(schema: dict[str, Any], max_tokens: int) -> None:
    """The very check that vLLM makes before it takes a request."""
    held = json_grammar(schema, max_tokens)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(held.value)
    assert not llguidance.LLMatcher.validate_grammar(grammar)
