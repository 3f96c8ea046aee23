"""Structured answers are whole, or an error with what came."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Generic, Literal, NotRequired, Required, TypedDict, TypeVar

import pytest
from langchain_core.exceptions import OutputParserException
from pydantic import BaseModel, RootModel

from blendrag.errors import BlendragWarning, ConfigError
from langchain_blendrag import ChatBlend
from langchain_rig import WAYS

WHOLE = '{"city": "Bergen", "note": "closed on Fridays", "floors": 3}'
CALL = '{"name": "Office", "arguments": ' + WHOLE + "}"
VALUES = {"city": "Bergen", "note": "closed on Fridays", "floors": 3}


class Office(BaseModel):
    """An office."""

    city: str = ""
    note: str = ""
    floors: int = 0


class Typed(TypedDict, total=False):
    """An office."""

    city: str
    note: str
    floors: int


TITLED = {**Office.model_json_schema(), "title": "Office"}
SCHEMAS = [
    (schema, method)
    for schema in (Office, Typed, TITLED)
    for method in ("json_schema", "json_mode", "function_calling")
]
SCHEMAS.append((None, "json_mode"))


ASK = {
    "batch": lambda runnable, question: runnable.batch([question]),
    **WAYS,
}


def held(
    make: Callable[..., ChatBlend], speaker: Any, schema: Any, method: Any, tokens: int, **more: Any
) -> Any:
    name = "Typed" if schema is Typed else "Office"
    speaker.answers = [CALL.replace("Office", name) if method == "function_calling" else WHOLE]
    return make(max_tokens=tokens).with_structured_output(schema, method=method, **more)


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize(("schema", "method"), SCHEMAS)
def test_whole_answer_is_read(
    make: Callable[..., ChatBlend], speaker: Any, schema: Any, method: str, ask: str
) -> None:
    wanted = Office(**VALUES) if schema is Office else VALUES
    assert ASK[ask](held(make, speaker, schema, method, 200), "Where?")[-1] == wanted
    raw = ASK[ask](held(make, speaker, schema, method, 200, include_raw=True), "Where?")[-1]
    assert raw["parsed"] == wanted and raw["parsing_error"] is None and raw["raw"].response_metadata


class Tags(BaseModel):
    words: set[str]


class TypedTags(TypedDict):
    words: set[str]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_set_is_made_of_a_list_that_may_repeat_an_item(
    make: Callable[..., ChatBlend], speaker: Any, method: Any
) -> None:
    found = {"words": ["red", "car", "red"]}
    for schema, wanted in ((Tags, Tags(words={"red", "car"})), (TypedTags, found)):
        call = {"name": schema.__name__, "arguments": found}
        speaker.answers = [json.dumps(found if method == "json_schema" else call)]
        assert make().with_structured_output(schema, method=method).invoke("?") == wanted
    with pytest.raises(ConfigError, match="uniqueItems"):
        make().with_structured_output(Tags.model_json_schema(), method=method).invoke("?")


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize(("schema", "method"), SCHEMAS)
def test_answer_that_was_cut_is_an_error_with_what_came(
    make: Callable[..., ChatBlend], speaker: Any, schema: Any, method: str, ask: str
) -> None:
    cut = 26 if method == "function_calling" else 18  # behind the first field, before the end
    parts: list[Any] = []
    with pytest.raises(OutputParserException, match="cut it off") as raised:
        parts += ASK[ask](held(make, speaker, schema, method, cut), "Where?")
    came = str(raised.value.llm_output)
    assert "Bergen" in came and "floors" not in came and speaker.answers[0].startswith(came)
    raw = ASK[ask](held(make, speaker, schema, method, cut, include_raw=True), "Where?")[-1]
    assert raw["parsed"] is None and isinstance(raw["parsing_error"], OutputParserException)
    assert raw["raw"].response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize("schema", [Typed, Office])
def test_stream_of_a_cut_answer_gives_beginnings_of_a_dictionary_alone_and_then_the_error(
    make: Callable[..., ChatBlend], speaker: Any, schema: Any
) -> None:
    parts: list[Any] = []
    with pytest.raises(OutputParserException):
        parts.extend(iter(held(make, speaker, schema, "json_schema", 18).stream("Where?")))
    assert ({"city": "Bergen"} in parts and VALUES not in parts) if schema is Typed else not parts


def test_stream_of_a_class_gives_whole_objects_only(make: Callable[..., ChatBlend], speaker: Any) -> None:
    assert ASK["stream"](held(make, speaker, Office, "json_schema", 200), "Where?") == [Office(**VALUES)]


def test_answer_whose_last_token_was_the_last_allowed_is_whole(
    make: Callable[..., ChatBlend], speaker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make()
    speaker.answers = [WHOLE + " and more"]
    most = len(speaker.tokenizer.encode(WHOLE, add_special_tokens=False))
    read = llm.with_structured_output(Typed).bind(max_tokens=most)
    assert read.invoke("Where?") == VALUES


@pytest.mark.parametrize(("said", "tokens"), [("1234567", 3), ("", 5), ('{"city": "Ber', 50)])
def test_number_that_may_have_lost_digits_is_an_error(
    make: Callable[..., ChatBlend], speaker: Any, said: str, tokens: int
) -> None:
    speaker.answers = [said or "<think>"]
    read = make(max_tokens=tokens).with_structured_output({"title": "N", "type": "integer"})
    with pytest.raises(OutputParserException, match="no whole JSON"):
        read.invoke("How many?")


AMOUNT = {"type": "object", "properties": {"amount": {"type": "integer"}}, "required": ["amount"]}
NAMED = {"name": "Fee", "description": "In euros."}


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        ({"name": "Fee", "schema": AMOUNT, "strict": True}, {"title": "Fee", **AMOUNT}),
        ({"type": "json_schema", "name": "Fee", "schema": AMOUNT}, {"title": "Fee", **AMOUNT}),
        (
            {"type": "json_schema", "json_schema": {"name": "Fee", "schema": AMOUNT}},
            {"title": "Fee", **AMOUNT},
        ),
        (AMOUNT, {"title": "answer", **AMOUNT}),
        (
            {"name": "Fees", "type": "array", "items": AMOUNT},
            {"title": "Fees", "type": "array", "items": AMOUNT},
        ),
        *(
            (schema, {"title": "Fee", "description": "In euros.", **AMOUNT})
            for schema in (
                {**NAMED, **AMOUNT},
                {**NAMED, "parameters": AMOUNT},
                {**NAMED, "input_schema": AMOUNT},
                {**NAMED, "inputSchema": AMOUNT},
                {"type": "function", "function": {**NAMED, "parameters": AMOUNT}},
                {"toolSpec": {**NAMED, "inputSchema": {"json": AMOUNT}}},
            )
        ),
        *(
            (schema, schema)
            for schema in (
                {"title": "Fee", "enum": ["low", "high"]},
                {"title": "Fee", "anyOf": [AMOUNT, {"type": "null"}]},
                {"title": "Fee", "$defs": {"A": AMOUNT}, "$ref": "#/$defs/A"},
                {"title": "Fees", "type": "object", "additionalProperties": {"type": "integer"}},
            )
        ),
        (RootModel[list[int]], RootModel[list[int]].model_json_schema()),
    ],
    ids=str,
)
def test_no_part_of_a_schema_is_lost(
    make: Callable[..., ChatBlend], schema: Any, wanted: dict[str, Any]
) -> None:
    for method in ("json_schema", "json_mode"):
        bound: Any = make().with_structured_output(schema, method=method)
        assert bound.first.kwargs["response_format"]["json_schema"]["schema"] == wanted


def test_schema_without_a_name_may_be_called(make: Callable[..., ChatBlend], speaker: Any) -> None:
    speaker.answers = ['{"name": "answer", "arguments": {"amount": 3}}']
    asked = make().with_structured_output(AMOUNT, method="function_calling")
    assert asked.invoke("How much?") == {"amount": 3}


@pytest.mark.parametrize(
    "wanted",
    [
        RootModel[list[int]],
        RootModel[list[int]].model_json_schema(),
        {"type": "json_schema", "schema": RootModel[list[int]].model_json_schema()},
        {"type": "json_object", "schema": RootModel[list[int]].model_json_schema()},
    ],
)
def test_answer_format_is_taken_in_any_form_that_names_a_schema(recorded_llm: ChatBlend, wanted: Any) -> None:
    request = recorded_llm._request_of("Fees?", {"response_format": wanted})
    assert request.schema == RootModel[list[int]].model_json_schema()


@pytest.mark.parametrize(
    "schema", [{"title": "Fees", "type": "array", "items": AMOUNT}, RootModel[list[int]]]
)
def test_arguments_of_a_call_are_an_object(make: Callable[..., ChatBlend], schema: Any) -> None:
    with pytest.raises(ConfigError, match="needs a schema of an object"):
        make().with_structured_output(schema, method="function_calling")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_tools_beside_a_schema_are_not_dropped_in_silence(
    make: Callable[..., ChatBlend], speaker: Any, method: str
) -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    with pytest.warns(BlendragWarning, match="ignored 'tools'.*bind_tools"):
        asked = held(make, speaker, Office, method, 200, tools=[tool])
    assert asked.invoke("Where?") == Office(**VALUES)


class Floor(TypedDict, total=False):
    number: Required[Annotated[int, ..., "from below"]]
    lift: bool


class Building(TypedDict):
    city: str | None
    closed: NotRequired[Annotated[str, ..., "since when"]]
    floors: list[Floor]
    best: Floor | None


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_field_of_a_typed_dict_may_be_left_out_or_null_where_it_says_so(
    make: Callable[..., ChatBlend], speaker: Any, method: Any
) -> None:
    written = '{"city": "Bergen", "floors": [{"number": 1}], "best": null}'
    speaker.answers = [f'{{"name": "Building", "arguments": {written}}}' if method[0] == "f" else written]
    llm = make().with_structured_output(Building, method=method)
    assert llm.invoke("Where?") == json.loads(written)
    grammar = speaker.asked[-1].sampling.grammar.value
    schema = grammar["properties"]["arguments"] if method[0] == "f" else grammar
    floor = schema["properties"]["floors"]["items"]
    assert (schema["required"], floor["required"]) == (["city", "floors", "best"], ["number"])
    assert [one["type"] for one in schema["properties"]["city"]["anyOf"]] == ["string", "null"]
    assert schema["properties"]["closed"]["description"] == "since when"
    assert floor["properties"]["number"]["description"] == "from below"
    assert "dict" not in str(grammar)  # whose own docstring stands for one that there is not


T = TypeVar("T")


@dataclass
class Pair(Generic[T]):
    both: list[T]


class Day(Enum):
    """A day of the week."""

    FRIDAY = "friday"
    SUNDAY = 7


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize(
    ("kind", "said", "value", "keyword"),
    [
        (Day, '"friday"', Day.FRIDAY, "enum"),
        (Literal["low", "high"], '"low"', "low", "enum"),
        (list[Office], f"[{WHOLE}]", [Office(**VALUES)], "items"),
        (Tags | Office, WHOLE, Office(**VALUES), "anyOf"),
        (Annotated[Office, "of ours"], WHOLE, Office(**VALUES), "properties"),
        (Pair[int], '{"both": [1, 2]}', Pair([1, 2]), "properties"),
        (Office | None, "null", None, "anyOf"),
        (int, "7", 7, "type"),
    ],
    ids=str,
)
def test_value_of_a_type_without_fields_is_answered(
    make: Callable[..., ChatBlend], speaker: Any, ask: str, kind: Any, said: str, value: Any, keyword: str
) -> None:
    speaker.answers = [said]
    assert ASK[ask](make().with_structured_output(kind), "What?") == [value]
    assert keyword in speaker.asked[-1].sampling.grammar.value
    with pytest.raises(ConfigError, match="schema of an object"):
        make().with_structured_output(kind, method="function_calling")


def test_value_that_does_not_fit_is_an_error_with_what_came(
    make: Callable[..., ChatBlend], speaker: Any
) -> None:
    speaker.answers = ['"never"']
    with pytest.raises(OutputParserException) as raised:
        make().with_structured_output(Day).invoke("When?")
    assert raised.value.llm_output == '"never"'
