"""Turns that other providers' models have written, and whatever their clients put into messages."""

from __future__ import annotations

import datetime
import json
import warnings
from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    HumanMessageChunk,
    RemoveMessage,
    SystemMessage,
    SystemMessageChunk,
    ToolMessage,
    ToolMessageChunk,
    message_chunk_to_message,
)
from langchain_core.messages.content import create_file_block

from blendrag.chat.answer import Piece
from blendrag.chat.request import make_request
from blendrag.errors import BlendragWarning, ConfigError
from blendrag.settings import Settings
from langchain_blendrag import ChatBlend
from langchain_blendrag._convert import chat_chunks, plain_messages

SKY: Any = {"type": "text", "text": "It is blue."}
# What stands beside the text of an assistant's turn, and what is counted as left out of it.
BESIDE: list[tuple[Any, dict[str, int]]] = [
    ({"type": "thinking", "thinking": "hm", "signature": "s"}, {}),
    ({"type": "redacted_thinking", "data": "xx"}, {}),
    ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "id": "r"}, {}),
    ({"type": "reasoning", "reasoning": "hm"}, {}),
    ({"type": "reasoning_content", "reasoning_content": {"text": "hm", "signature": "s"}}, {}),
    ({"reasoningContent": {"reasoningText": {"text": "hm"}}}, {}),
    ({"text": "hm", "thought": True}, {}),
    ({"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}, {"function_call": 1}),
    ({"type": "tool_call_chunk", "name": "f", "args": "{}", "id": "1", "index": 0}, {"tool_call_chunk": 1}),
    ({"toolUse": {"toolUseId": "1", "name": "f", "input": {}}}, {"toolUse": 1}),
    ({"functionCall": {"name": "f", "args": {}}}, {"functionCall": 1}),
    ({"cachePoint": {"type": "default"}}, {}),
    ({"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}}, {"server_tool_use": 1}),
    ({"type": "web_search_call", "id": "w", "status": "completed"}, {"web_search_call": 1}),
    ({"type": "executable_code", "executable_code": "1+1", "language": "PYTHON"}, {"executable_code": 1}),
    ({"executableCode": {"code": "1+1"}}, {"executableCode": 1}),
    ({"type": "non_standard", "value": {"x": 1}}, {"non_standard": 1}),
    ({"type": "image", "base64": "aGk=", "mime_type": "image/png"}, {"image": 1}),
    ({"type": "image_generation_call", "result": None, "id": "i"}, {"image_generation_call": 1}),
    ({"type": "image_generation_call", "result": "iVBORw0KGgo=", "id": "i"}, {"image_generation_call": 1}),
    ({"type": "new_in_2027", "payload": {"a": [1]}}, {"new_in_2027": 1}),
]
# Blocks with text of their own, in any message.
READ: list[tuple[Any, str]] = [
    (["It is ", "blue."], "It is blue."),
    ([{"text": "It is blue."}], "It is blue."),
    ([{"text": "It is blue.", "thoughtSignature": "s"}, {"cachePoint": {}}], "It is blue."),
    ([{"type": "input_text", "text": "It is blue."}], "It is blue."),
    ([{"type": "output_text", "text": "It is blue.", "annotations": []}], "It is blue."),
    ([{"type": "text", "text": "It is ", "cache_control": {}}, {"text": "blue."}], "It is blue."),
    ([{"type": "text-plain", "mime_type": "text/plain", "text": "It is blue."}], "It is blue."),
    ([{"type": "file", "source_type": "text", "text": "It is blue."}], "It is blue."),
    ([{"type": "message", "content": [{"type": "output_text", "text": "It is blue."}]}], "It is blue."),
    ([{"type": "resource", "resource": {"uri": "u", "text": "It is blue."}}], "It is blue."),
    ([{"type": "file_search_call", "results": [{"text": "It is blue.", "filename": "f"}]}], "It is blue."),
    ([{"type": "code_interpreter_call", "outputs": [{"type": "logs", "logs": "blue"}]}], "blue"),
    ([{"type": "code_execution_result", "code_execution_result": "blue"}], "blue"),
    ([{"type": "bash_code_execution_tool_result", "content": {"type": "x", "stdout": "blue"}}], "blue"),
    ([{"type": "bash_code_execution_result", "stdout": "", "stderr": "It is grey."}], "It is grey."),
    ([{"type": "bash_code_execution_result", "stdout": "blue", "stderr": "grey"}], "blue\ngrey"),
    ([{"type": "refusal", "refusal": "I cannot say."}], "I cannot say."),
    ([{"type": "non_standard", "value": {"type": "text", "text": "It is blue."}}], "It is blue."),
    ([{"type": "audio", "transcript": "It is blue.", "id": "a"}], "It is blue."),
    ([{"type": "tool_result", "content": [SKY]}], "It is blue."),
    ([{"type": "server_tool_result", "output": "It is blue.", "status": "success"}], "It is blue."),
    ([{"toolResult": {"toolUseId": "1", "content": [{"text": "It is blue."}]}}], "It is blue."),
    ([{"toolResult": {"toolUseId": "1", "content": [{"json": {"sky": "blü"}}]}}], '{"sky": "blü"}'),
    ([{"functionResponse": {"name": "f", "response": {"result": "It is blue."}}}], "It is blue."),
    ([{"functionResponse": {"name": "f", "response": {"sky": "blü"}}}], '{"sky": "blü"}'),
    ([{"guardContent": {"text": {"text": "It is blue."}}}], "It is blue."),
    ([{"citationsContent": {"content": [{"text": "It is blue."}], "citations": []}}], "It is blue."),
    ([{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "It is blue."}}],
     "It is blue."),
    ([{"type": "document", "document": {"id": "1", "data": {"sky": "blü"}}}], '{"sky": "blü"}'),
    ([{"type": "document", "title": "Sky", "context": "Noon", "source": {"content": [SKY]}}],
     "Sky\nNoon\nIt is blue."),
    ([{"type": "document", "title": "Sky", "source": {"type": "content", "content": [SKY]}}],
     "Sky\nIt is blue."),
    ([{"type": "search_result", "source": "https://sky", "title": "Sky", "content": [SKY]}],
     "Sky\nIt is blue."),
    ([{"toolResult": {"content": [{"searchResult": {"source": "u", "title": "Sky", "content": [SKY]}}]}}],
     "Sky\nIt is blue."),
    ([{"type": "text-plain", "title": "Sky", "context": "Noon", "text": "It is blue."}],
     "Sky\nNoon\nIt is blue."),
    ([SKY, {"type": "search_result", "source": "https://sky", "content": [SKY]}, SKY],
     "It is blue.\n\nIt is blue.\n\nIt is blue."),
]  # fmt: skip


def content_of(message: BaseMessage) -> Any:
    (plain,) = plain_messages([message])
    return plain["content"]


@pytest.mark.parametrize(("block", "counted"), BESIDE, ids=lambda value: str(value)[:40])
def test_text_of_a_turn_is_kept_and_what_has_none_is_counted(block: Any, counted: dict[str, int]) -> None:
    turns = [HumanMessage("What colour?"), AIMessage(content=[block, SKY]), HumanMessage("Sure?")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = plain_messages(turns)
    assert [one["content"] for one in plain] == ["What colour?", "It is blue.", "Sure?"]
    said = [str(one.message) for one in caught if issubclass(one.category, BlendragWarning)]
    assert said == [f"left out, as having no text: {kind} (1)" for kind in counted]


@pytest.mark.parametrize(
    "make", [HumanMessage, AIMessage, SystemMessage, lambda c: ToolMessage(c, tool_call_id="1")]
)
@pytest.mark.parametrize(("content", "text"), READ, ids=lambda value: str(value)[:40])
@pytest.mark.filterwarnings(f"error::{BlendragWarning.__module__}.BlendragWarning")
def test_text_in_a_block_is_read_whatever_it_is_called(make: Any, content: Any, text: str) -> None:
    assert content_of(make(content)) == text


@pytest.mark.parametrize(
    ("make", "between"),
    [
        (HumanMessage, "\n"),
        (SystemMessage, "\n"),
        (lambda c: ToolMessage(c, tool_call_id="1"), "\n"),
        (AIMessage, ""),
    ],
)
def test_parts_that_are_given_stay_apart_and_those_of_an_answer_are_one_text(make: Any, between: str) -> None:
    parts = [{"type": "text", "text": one} for one in ("Turku", "Oulu", " 12", "34\n", "5")]
    assert content_of(make(parts)) == f"Turku{between}Oulu 12{between}34\n5"
    assert content_of(make([{"type": "tool_result", "content": parts[:2]}])) == f"Turku{between}Oulu"


@pytest.mark.parametrize(
    "rows",
    [
        [{"title": "Å", "url": "a.example"}, {"file": "a.py", "line": 3}, {"a": {"b": None}}],
        [{"value": "12", "unit": "km"}, {"value": "13", "unit": "mi"}],
        [{"title": "Å", "content": "Aa", "url": "a.example", "score": 0.9}],
        [{"name": "Ann", "age": 3}, {"name": "Bob", "text": "note"}],
        [{"query": "x", "results": [{"content": "Aa"}]}],
        [{"result": "ok"}, {"result": "ok", "balance": 120}],
    ],
)
@pytest.mark.filterwarnings(f"error::{BlendragWarning.__module__}.BlendragWarning")
def test_data_of_a_tool_is_written_as_json(rows: list[Any]) -> None:
    assert content_of(ToolMessage(rows, tool_call_id="1")) == json.dumps(rows, ensure_ascii=False)


@pytest.mark.parametrize("between", [{"functionCall": {"name": "f"}}, {"type": "tool_use", "id": "1"}])
def test_sentences_around_a_call_stay_apart(between: dict[str, Any]) -> None:
    message = AIMessage([{"text": "I look it up."}, between, {"text": "It is blue."}], tool_calls=[CALL])
    assert content_of(message) == "I look it up.\n\nIt is blue."


CALL: Any = {"name": "f", "args": {"x": 1}, "id": "1"}


@pytest.mark.parametrize(
    "more", [{"refusal": "I cannot say."}, {"audio": {"id": "a", "transcript": "I cannot say."}}]
)
def test_what_openai_keeps_beside_the_content_is_kept(more: dict[str, Any]) -> None:
    assert content_of(AIMessage("", additional_kwargs=more)) == "I cannot say."
    assert content_of(AIMessage("Blue.", additional_kwargs=more)) == "Blue."


@pytest.mark.parametrize(
    "more", [{"audio": "x"}, {"refusal": ["x"]}, {"function_call": "f"}, {"audio": {"transcript": 1}}]
)
def test_what_stands_there_in_another_form_is_passed_over(more: dict[str, Any]) -> None:
    (plain,) = plain_messages([AIMessage("", additional_kwargs=more)])
    assert plain["content"] == "" and "tool_calls" not in plain


@pytest.mark.parametrize(
    "block",
    [
        {"type": "text-plain", "base64": "aGVsbG8=", "mime_type": "text/plain"},
        {"type": "file", "base64": "aGVsbG8=", "mime_type": "text/markdown"},
        {"type": "file", "base64": "aGVsbG8=", "mime_type": "application/json"},
        {"type": "media", "data": "aGVsbG8=", "mime_type": "text/plain"},
        {"type": "file", "source_type": "base64", "data": "aGVsbG8=", "mime_type": "text/csv"},
        {"type": "file", "file": {"filename": "a.txt", "file_data": "data:text/plain;base64,aGVsbG8="}},
        {"type": "file", "file": {"filename": "a.log", "file_data": "data:text/plain;base64,aGVsbG8="}},
        {"type": "file", "file": {"filename": "README", "file_data": "data:text/plain;base64,aGVsbG8="}},
        create_file_block(base64="aGVsbG8=", mime_type="text/plain", filename="scan.pdf"),
        {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,aGVsbG8="},
    ],
)
def test_file_of_text_is_read_from_its_bytes(make: Any, speaker: Any, block: Any) -> None:
    assert content_of(HumanMessage([block])) == "hello"
    make().invoke([HumanMessage([block])])  # which is what LangChain makes of it first
    assert "\nhello<" in speaker.prompts()[-1]


def test_answer_with_a_thought_inside_is_one_text() -> None:
    thought = {"type": "reasoning", "reasoning": "Hm."}
    message = AIMessage([{"type": "text", "text": "Hel"}, thought, {"type": "text", "text": "lo"}])
    assert content_of(message) == "Hello"


def test_call_in_openais_former_form_is_the_messages_own() -> None:
    called = {"function_call": {"name": "f", "arguments": '{"x": 1}'}}
    turns = [AIMessage("", additional_kwargs=called), FunctionMessage("r", name="f")]
    call, result = make_request(Settings(), plain_messages(turns), {}).messages
    assert call["tool_calls"][0]["arguments"] == {"x": 1} and result["name"] == "f"


PICTURES = [
    {"type": "image_url", "image_url": {"url": "data:x"}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
    {"image": {"format": "png", "source": {"bytes": b"x"}}},
    {"type": "input_image", "image_url": "https://x"},
    {"type": "media", "mime_type": "audio/wav", "data": "aGk="},
    {"inlineData": {"mimeType": "image/png", "data": "aGk="}},
    {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
    {"type": "file", "base64": "x", "mime_type": "application/pdf"},
    {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}},
    {"type": "video", "url": "https://x"},
    {"type": "text-plain", "url": "https://x", "mime_type": "text/plain"},
    {"type": "tool_result", "content": [SKY, {"type": "image", "source": {"type": "base64", "data": "x"}}]},
]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda value: str(value)[:40])
def test_picture_is_refused_in_a_question_and_counted_in_what_was_answered(picture: Any) -> None:
    asked = HumanMessage([{"type": "text", "text": "What is this?"}, picture])
    call: Any = {"name": "look", "args": {}, "id": "1"}
    result = [AIMessage("", tool_calls=[call]), ToolMessage("Seen.", tool_call_id="1")]
    for turns in ([asked], [HumanMessage("Hi."), AIMessage("Hello."), asked], [asked, *result]):
        with pytest.raises(ConfigError, match="reads text only"):
            plain_messages(turns)
    with pytest.warns(BlendragWarning, match=r"left out, as having no text: [\w-]+ \(1\)"):
        plain = plain_messages([asked, AIMessage("A crane."), HumanMessage("How high?")])
    assert plain[0]["content"].startswith("What is this?")


def test_every_kind_of_message_becomes_a_turn(recorded_llm: ChatBlend) -> None:
    day = datetime.date(2024, 1, 2)
    calls: Any = [{"name": "f", "args": {"day": day}, "id": None}, {"name": "g", "args": {}, "id": "b"}]
    broken: Any = {"name": None, "args": '{"a', "id": None, "error": "cut", "type": "invalid_tool_call"}
    turns = [
        RemoveMessage(id="gone"),
        ChatMessage(role="developer", content="Be kind."),
        HumanMessage("", name="ada"),
        ToolMessage("nobody asked", tool_call_id="x"),
        AIMessage("", tool_calls=calls),
        ToolMessage([], tool_call_id="b"),
        FunctionMessage(name="f", content="of old"),
        ChatMessage(role="critic", content="Be stern."),
        AIMessage("", invalid_tool_calls=[broken]),
        HumanMessage("Again."),
    ]
    with pytest.warns(BlendragWarning, match=r"invalid_tool_call \(1\)"):
        prompt = recorded_llm.render(turns)
    assert "<|im_start|>system\nBe kind." in prompt
    for shown in ("Be kind.", "nobody asked", "2024-01-02", "of old", "Be stern.", "Again."):
        assert shown in prompt


@pytest.mark.filterwarnings(f"error::{BlendragWarning.__module__}.BlendragWarning")
def test_message_that_was_streamed_is_the_turn_that_it_adds_up_to(recorded_llm: ChatBlend) -> None:
    call = {"name": "look", "args": "{}", "id": "1", "index": 0}
    whole = AIMessageChunk("It is ") + AIMessageChunk("blue.", tool_call_chunks=[call])
    streamed = [SystemMessageChunk("Be kind."), HumanMessageChunk("Sky?"), whole]
    streamed += [ToolMessageChunk("blue", tool_call_id="1")]
    assert [one["role"] for one in plain_messages(streamed)] == ["system", "user", "assistant", "tool"]
    plain = [message_chunk_to_message(one) for one in streamed]
    assert recorded_llm.render(streamed) == recorded_llm.render(plain)


def test_call_in_a_block_is_the_messages_own() -> None:
    call: Any = {"name": "f", "args": {}, "id": "1"}
    block = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    (plain,) = plain_messages([AIMessage(content=[block, SKY], tool_calls=[call])])
    assert plain["content"] == "It is blue." and [one["name"] for one in plain["tool_calls"]] == ["f"]


def test_message_that_is_nested_too_deeply_is_named() -> None:
    block: Any = SKY
    for _ in range(5000):
        block = {"type": "non_standard", "value": block}
    with pytest.raises(ConfigError, match="nested too deeply"):
        plain_messages([HumanMessage([block])])


def test_piece_without_text_and_thinking_is_no_chunk() -> None:
    assert not [*chat_chunks(Piece(""))]
    assert [len([*chat_chunks(piece)]) for piece in (Piece("a"), Piece("", reasoning="b"))] == [1, 1]
