"""Schemas that an answer can fulfil within its tokens."""

from __future__ import annotations

import contextlib
import copy
import json
from datetime import date
from enum import IntEnum
from random import Random
from typing import Annotated, Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import UUID4, UUID5, Field, TypeAdapter

from blendrag.chat.foreign import class_schema
from blendrag.chat.schema import json_grammar, with_room
from blendrag.engine.client.generation import Grammar
from blendrag.errors import ConfigError
from grammars import BYTES, held, matcher_of

JOKE = {
    "type": "object",
    "properties": {"setup": {"type": "string"}, "punchline": {"type": "string"}},
    "required": ["setup", "punchline"],
}


def test_open_strings_share_the_tokens_and_what_is_not_named_is_closed() -> None:
    before = copy.deepcopy(JOKE)
    roomy = with_room(JOKE, 100)
    assert [roomy["properties"][name]["maxLength"] for name in ("setup", "punchline")] == [100, 100]
    assert roomy["additionalProperties"] is False and before == JOKE


@pytest.mark.parametrize(
    ("string", "held"),
    [
        *((one, one) for one in ({"maxLength": 3}, {"enum": ["a"]}, {"const": "a"}, {"pattern": "a+"})),
        ({"format": "date"}, {"format": "date"}),
        *(({"format": one}, {"format": one, "maxLength": 200}) for one in ("uri", "email")),
        ({"maxLength": 2083}, {"maxLength": 200}),
    ],
)
def test_string_ends_within_the_tokens_unless_that_is_decided(string: Any, held: Any) -> None:
    assert with_room({"type": "string", **string}, 100) == {"type": "string", **held}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "format": "time"}, ["20:00:00Z", "20:00:00.123456+01:00"], "20:00:00.0000000Z"),
        (
            {"type": "string", "format": "date-time"},
            ["2026-01-31T20:00:00Z", "2026-01-31T20:00:00.5+01:00"],
            "2026-01-31T20:00:00.0000000Z",
        ),
        ({"type": "string", "format": "duration"}, ["P1Y2M10DT2H30M15S", "PT45M", "P3W"], "P1234567D"),
        ({"type": "number", "minimum": 0, "maximum": 1}, [0, 1, 0.5, 0.0123456789], 0.12345678901),
        ({"type": "number", "exclusiveMinimum": 0}, [12.5, 123456789012, 0.1], 0.12345678901),
        ({"type": "number", "minimum": -1.5}, [-1.25, 0.5], -2),
        ({"type": "number", "minimum": 0, "enum": [0.123456789012, 2]}, [0.123456789012, 2], 0.1),
    ],
)
def test_digits_end(schema: dict[str, Any], right: list[Any], wrong: Any) -> None:
    grammar = json_grammar(schema, 100)
    assert all(held(grammar, json.dumps(value)) for value in right)
    assert not held(grammar, json.dumps(wrong))


@pytest.mark.parametrize(
    "free", [{"type": "object"}, {"type": "object", "properties": {}, "additionalProperties": True}]
)
def test_object_that_is_meant_to_be_free_stays_free(free: dict[str, Any]) -> None:
    assert with_room(free, 100) == free


def test_properties_named_like_keywords_are_properties() -> None:
    names = {"type": {"type": "integer"}, "properties": {"type": "string"}, "enum": {"type": "boolean"}}
    held = with_room({"type": "object", "properties": names}, 10)
    assert set(held["properties"]) == set(names)
    assert held["properties"]["properties"]["maxLength"] == 20


def test_halves_of_one_object_allow_each_other() -> None:
    half = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert with_room({"allOf": [half, {**half}]}, 10) == {"allOf": [half, half]}


def fill(name: str, properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: properties}, "required": [name]}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
        {"allOf": [{"$ref": "#/$defs/a"}], "properties": {"b": {"type": "integer"}}, "required": ["b"]},
        {"$ref": "#/$defs/a", "required": ["a", "b"], "properties": {"b": {"type": "integer"}}},
        {"type": "object", "anyOf": [{"$ref": "#/$defs/a"}], "required": ["b"]},
        {"allOf": [fill("in", {"$ref": "#/$defs/a"}), fill("in", {"$ref": "#/$defs/b"})]},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"]},
    ],
)
def test_object_described_in_several_places_has_a_value(schema: dict[str, Any]) -> None:
    definitions = {"a": fill("a", {"type": "integer"}), "b": fill("b", {"type": "integer"})}
    schema = {**schema, "$defs": definitions}
    jsonschema.validate(walked(json_grammar(schema, 50), Random(1)), schema)


def test_object_that_stands_alone_behind_a_reference_is_closed() -> None:
    schema = {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": fill("a", True)}}
    assert json_grammar(schema, 50).value["$defs"]["a"]["additionalProperties"] is False


@pytest.mark.parametrize("kind", ["password", "uri-reference", "path", "int64"])
def test_format_that_only_readers_know_is_dropped(kind: str) -> None:
    assert "format" not in json_grammar({"type": "string", "format": kind}, 50).value


@pytest.mark.parametrize(
    "own", [{"enum": ["0a1b2c3d-0000-4000-8000-0123456789ab"]}, {"maxLength": 36}, {"pattern": "^3"}]
)
def test_format_of_a_uuid_says_nothing_beside_what_decides(own: dict[str, Any]) -> None:
    schema = {"type": "string", **own}
    assert json_grammar({**schema, "format": "uuid4"}, 50) == json_grammar(schema, 50)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "https://example.com/place.json"}, "refers to 'https://example.com/place.json'"),
        ({"$ref": "#/$defs/gone"}, "not in it"),
        ({"$ref": "#"}, "no end"),
        (fill("a", {"$ref": "#"}), "no end"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "no end"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "no end"),
        ({"not": {"type": "string"}}, "not"),
        ({"not": {}}, "nothing matches"),
        ({"type": "number", "multipleOf": 0.5, "maximum": -10}, "multiples of negative numbers"),
        (fill("a", {"type": "number", "multipleOf": 0.5, "exclusiveMaximum": 0}), "[Uu]nsat"),
        ({"type": "object", "propertyNames": {"type": "integer"}}, "propertyNames"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "strnig"}, "strnig"),
        ({"properties": 3}, "properties"),
        ({"type": "array", "minItems": 10**9}, "minItems"),
        ({"type": "object", "minProperties": 10**9}, "minProperties"),
        ({"enum": list(range(100_000))}, "too big"),
        ({"type": "string", "pattern": "("}, "pattern|unclosed"),
        ({"$id": 5}, "no JSON schema"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "minimum"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf"),
    ],
)
def test_schema_that_no_answer_can_be_held_to_is_refused_with_a_reason(
    schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s)the schema: .*({reason})"):
        json_grammar(schema, 100)


def test_what_contains_itself_nests_a_few_times_and_ends() -> None:
    chain = {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "child": {"$ref": "#"}}
    schema = {"type": "object", "properties": chain, "required": ["n"]}
    grammar, value = json_grammar(schema, 150), {"n": 1}
    text, deepest = json.dumps(value), 0
    while held(grammar, text):
        deepest, value = deepest + 1, {"n": 1, "child": value}
        text = json.dumps(value)
    assert 3 < deepest < 12


def test_deep_schema_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(ConfigError, match="too deeply"):
        json_grammar(schema, 100)


def test_most_items_of_an_array_are_as_many_as_tokens() -> None:
    assert json_grammar({"type": "array", "maxItems": 10**9}, 100).value["maxItems"] == 100


leaves = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "minLength": 3},
        {"type": "string", "pattern": "^[a-c]{2,4}$"},
        {"type": "string", "format": "date"},
        {"type": ["string", "null"]},
        {"type": "integer"},
        {"type": "integer", "minimum": 3, "maximum": 12},
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "boolean"},
        {"enum": ["a", 2, None]},
        {"const": {"a": [1]}},
        {"$ref": "#/$defs/leaf"},
        {"$ref": "#/definitions/more~1less"},
        {"$ref": "#/$defs/tree", "description": "A tree."},
        {"$ref": "#anchor"},
    ]
)
names = st.sampled_from(["a", "type", "default", "enum", "properties", "$ref", "ü"])


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda properties, wanted, more: {
            "type": "object", "properties": properties, "required": sorted(wanted & properties.keys()), **more
        },
        st.dictionaries(names, inner, max_size=3),
        st.frozensets(names),
        st.sampled_from([{}, {"additionalProperties": False}, {"additionalProperties": {"type": "integer"}}]),
    )  # fmt: skip


schemas = st.recursive(
    leaves,
    lambda inner: (
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 3}, inner)
        | objects(inner)
        | st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner)
        | st.builds(lambda one: {"allOf": [one], "title": "One"}, inner)
        | st.builds(lambda one, other: {"allOf": [one, other]}, objects(leaves), objects(leaves))
        | st.builds(lambda one, other: {**one, "anyOf": [other, {}]}, objects(leaves), objects(leaves))
    ),
    max_leaves=8,
)
DEFINITIONS = {
    "$defs": {
        "leaf": {"type": "integer", "minimum": 0, "maximum": 5},
        "tree": {
            "$anchor": "anchor",
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/tree"}, "word": {"$ref": "#/definitions/word"}},
            "required": ["word"],
        },
    },
    "definitions": {"word": {"type": "string", "maxLength": 4}, "more/less": {"enum": ["more", "less"]}},
}


PLAIN = {*range(32, 127)} - {92}


def walked(grammar: Grammar, random: Random, most: int = 400) -> Any:
    """A value that the grammar has at random, nearing an end."""
    matcher, text = matcher_of(grammar), bytearray()
    for step in range(most):
        allowed = [token for token, bias in enumerate(matcher.compute_logit_bias()) if bias]
        assert allowed and not matcher.is_error(), matcher.get_error()
        ends = [token for token in (BYTES.eos_token, *b'"}]') if token in allowed]
        if ends and step > 30:
            token = ends[0]
        else:
            readable = [one for one in allowed if one == BYTES.eos_token or one in PLAIN]
            token = random.choice(readable or allowed)
        if token == BYTES.eos_token:
            break
        matcher.consume_token(token)
        text.append(token)
        if matcher.is_stopped():
            break
    else:
        return None  # numbers may go on for ever
    return json.loads(text)


@given(schemas, st.integers(1, 4096), st.randoms(use_true_random=False))
def test_answer_held_to_a_schema_keeps_it(schema: dict[str, Any], max_tokens: int, random: Random) -> None:
    """By the very grammar that the engine uses."""
    schema = {**DEFINITIONS, **schema}
    try:
        grammar = json_grammar(schema, max_tokens)
    except ConfigError as error:
        assert any(word in str(error) for word in ("nsatisfiable", "intersection"))
        return
    if (value := walked(grammar, random)) is not None:
        jsonschema.validate(value, schema)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["#", "object", "string", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["$ref", "type", "a"]), inner)
    ),
    max_leaves=6,
)
keywords = st.sampled_from(
    ["$ref", "$id", "$schema", "$defs", "type", "properties", "required", "items", "anyOf", "allOf", "enum",
     "minItems", "maxItems", "format", "minLength", "maxLength"]
)  # fmt: skip


@given(st.dictionaries(keywords, json_values))
def test_what_is_no_schema_is_refused_or_taken(schema: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        json_grammar(schema, 10)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, [1, 1], ["a"]),
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}}, {"a": 1}, [1]),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, {"a": 1}, {"b": 1}),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**64}, 7, "a"),
        ({"type": "number", "minimum": -1.7976931348623157e308, "exclusiveMaximum": 1e300}, 7.5, "a"),
        ({"type": "object", "properties": {"a": {}, "b": {"not": {}}}}, {"a": 1}, {"b": 1}),
    ],
)
def test_keyword_that_says_nothing_refuses_no_schema(schema: dict[str, Any], right: Any, wrong: Any) -> None:
    grammar = json_grammar({"type": "object", "properties": {"x": schema}, "required": ["x"]}, 100)
    assert held(grammar, json.dumps({"x": right})) and not held(grammar, json.dumps({"x": wrong}))


@pytest.mark.parametrize(
    "value",
    [
        {"type": "string"},
        {"type": "STRING"},
        {"type": "string", "enum": ["a"]},
        {"enum": ["a"]},
        {"$ref": "#/$defs/a"},
        {"allOf": [{"$ref": "#/$defs/a"}]},
    ],
)
def test_value_that_openapi_calls_nullable_may_be_null(value: dict[str, Any]) -> None:
    schema: Any = {"type": "object", "properties": {"x": value}, "required": ["x"]}
    schema["$defs"] = {"a": {"type": "string"}}
    assert not held(json_grammar(schema, 100), '{"x": null}')
    schema["properties"]["x"]["nullable"] = True
    grammar = json_grammar(schema, 100)
    assert all(held(grammar, value) for value in ('{"x": null}', '{"x": "a"}'))
    assert not held(grammar, '{"x": 1}')


@pytest.mark.parametrize("names", [{"enum": ["a", "b"]}, {"$ref": "#/$defs/Names"}])
def test_dictionary_has_no_keys_but_those_of_its_enumeration(names: dict[str, Any]) -> None:
    schema = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
    grammar = json_grammar({**schema, "$defs": {"Names": {"type": "string", "enum": ["a", "b"]}}}, 100)
    assert all(held(grammar, value) for value in ("{}", '{"b": 1}', '{"a": 1, "b": 2}'))
    assert not any(held(grammar, value) for value in ('{"c": 1}', '{"a": "x"}', '{"a": 1, "c": 2}'))
    one = json_grammar({**schema, "propertyNames": {"const": "a"}}, 100)
    assert held(one, '{"a": 1}') and not held(one, '{"b": 1}')
    with pytest.raises(ConfigError, match="propertyNames"):
        json_grammar({**schema, "propertyNames": {"pattern": "^a", "maxLength": 3}}, 100)


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (dict[date, int], {"2026-01-31": 1}, {"2026-01-31": "x"}),
        (UUID4, "1f0c8a52-7a3e-4b1d-9c55-0a1b2c3d4e5f", "1f0c8a52-7a3e-1b1d-9c55-0a1b2c3d4e5f"),
        (UUID5 | None, None, "any"),
        (dict[IntEnum("Floor", "LOW HIGH"), int], {"1": 1, "2": 2}, {"3": 1}),  # type: ignore[misc]
        (dict[Annotated[str, Field(min_length=2, max_length=3)], int], {"ab": 1}, {"abcd": 1}),
    ],
)
def test_value_of_a_class_has_its_kind(kind: Any, right: Any, wrong: Any) -> None:
    grammar = json_grammar(TypeAdapter(kind).json_schema(), 100)
    assert held(grammar, json.dumps(right)) and not held(grammar, json.dumps(wrong))


def test_dictionary_has_no_keys_but_those_of_their_pattern() -> None:
    schema = {"type": "object", "propertyNames": {"pattern": "^[a-z]$"}}
    grammar = json_grammar({**schema, "additionalProperties": {"type": "integer"}}, 100)
    assert held(grammar, '{"a": 1}')
    assert not any(held(grammar, value) for value in ('{"1": 1}', '{"a": "x"}'))


def test_multiples_are_held_and_those_of_a_class_may_be_negative_where_its_bounds_say_so() -> None:
    """Grammars know those from zero up only."""
    step: dict[str, Any] = {"type": "number", "multipleOf": 0.5}
    for schema in (step, class_schema(step), {**step, "maximum": 100, "exclusiveMaximum": False}):
        grammar = json_grammar(schema, 100)
        assert held(grammar, "1.5") and not held(grammar, "1.2")
    assert held(json_grammar({"type": "integer", "multipleOf": 1}, 100), "-3")
    for bound in ({"minimum": -10}, {"exclusiveMaximum": 0}):
        assert held(json_grammar(class_schema({**step, **bound}), 100), "-1.5")


def test_class_tells_by_itself_which_of_a_union_is_meant() -> None:
    """Its ``oneOf`` may have parts that overlap, which grammars refuse."""
    schema = {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}], "title": "Union"}
    grammar = json_grammar(class_schema(schema), 100)
    assert held(grammar, '"ab"') and not held(grammar, "1")
    both = {"anyOf": [{"type": "string"}], "oneOf": [{"minLength": 1}]}
    assert class_schema(both) == both
    assert class_schema({"properties": {"oneOf": {"type": "string"}}})["properties"].keys() == {"oneOf"}


def test_part_of_negative_multiples_costs_the_schema_nothing_else() -> None:
    below = {"type": "integer", "multipleOf": 5, "maximum": -5}
    either = json_grammar({"anyOf": [below, {"type": "string"}]}, 100)
    assert held(either, '"a"') and not held(either, "-5")
    whole = {"type": "object", "properties": {"a": below, "b": {"type": "string"}}, "required": ["b"]}
    optional = json_grammar(whole, 100)
    assert held(optional, '{"b": "x"}')
    assert matcher_of(optional).try_consume_tokens(list(b'{"a": ')) < 3  # where nothing could follow


def test_alternative_that_no_grammar_holds_is_left_out_while_there_are_others() -> None:
    """As of decimal numbers, which pydantic lets be strings of a pattern that looks ahead."""
    looking = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
    total = {"$ref": "#/$defs/Total"}
    definitions = {"Total": {"anyOf": [{"type": "number"}, looking, {"type": "null"}]}}
    grammar = json_grammar(
        {"type": "object", "properties": {"total": total}, "required": ["total"], "$defs": definitions}, 100
    )
    assert held(grammar, '{"total": 3.5}') and held(grammar, '{"total": null}')
    assert not held(grammar, '{"total": "3.5"}')
    with pytest.raises(ConfigError, match="look-around"):
        json_grammar({"type": "object", "properties": {"x": {"anyOf": [looking]}}}, 100)
