"""Histories that other classes, and other providers' models, have written."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable
from decimal import Decimal
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from llama_index.core.base.llms.types import (
    AudioBlock,
    CacheControl,
    CachePoint,
    CitableBlock,
    CitationBlock,
    DocumentBlock,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    VideoBlock,
)
from llama_index.core.llms import ChatMessage
from llama_index.core.llms.llm import ToolSelection
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from openai.types.chat.chat_completion_message_function_tool_call import Function

from blendrag.chat.request import make_request
from blendrag.errors import BlendragWarning, ConfigError
from blendrag.settings import Settings
from llama_index.llms.blendrag import BlendLLM
from llama_index.llms.blendrag.messages import plain_messages

BLUE = TextBlock(text="It is blue.")
SILENT = [
    ThinkingBlock(content="hm"),
    CachePoint(cache_control=CacheControl(type="ephemeral")),
    ToolCallBlock(tool_call_id="1", tool_name="look", tool_kwargs={}),
]
PICTURES = [
    ImageBlock(image=b"x"),
    AudioBlock(audio=b"x"),
    VideoBlock(video=b"x"),
    DocumentBlock(data=b"%PDF-1.7 \x00", document_mimetype="application/pdf"),
    DocumentBlock(url="http://localhost:9/notes.txt", document_mimetype="text/plain"),
]


def read(*messages: ChatMessage) -> list[Any]:
    return list(make_request(Settings(), plain_messages(messages), {}).messages)


def texts_of(*messages: ChatMessage) -> list[str]:
    return [str(message["content"]) for message in read(*messages)]


def said_by(role: str, *blocks: Any) -> str:
    (text,) = texts_of(ChatMessage(role=role, blocks=list(blocks)))
    return text


@pytest.mark.parametrize("role", ["user", "assistant", "system", "tool"])
@pytest.mark.parametrize("block", SILENT, ids=lambda block: block.block_type)
def test_what_is_kept_elsewhere_is_passed_over(block: Any, role: str) -> None:
    assert said_by(role, block, BLUE) == "It is blue."


@pytest.mark.parametrize("role", ["assistant", "system", "tool"])
@pytest.mark.parametrize("block", PICTURES, ids=lambda block: block.block_type)
def test_what_is_no_text_is_left_out_of_what_models_and_tools_said(block: Any, role: str) -> None:
    with pytest.warns(BlendragWarning, match=f"left out content of type '{block.block_type}'") as caught:
        assert said_by(role, block, BLUE, block) == "It is blue."
    assert [each.category for each in caught].count(BlendragWarning) == 1


@pytest.mark.parametrize("block", PICTURES, ids=lambda block: block.block_type)
def test_what_a_user_shows_is_refused_not_dropped(block: Any) -> None:
    with pytest.raises(ConfigError, match=f"type '{block.block_type}'; this model reads text only"):
        said_by("user", BLUE, block)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (DocumentBlock(path="missing.txt"), "it cannot be read: .*No such file"),
        (DocumentBlock(data=b"", document_mimetype="text/plain"), "it cannot be read: "),
        (DocumentBlock(data="größe".encode("cp1252"), document_mimetype="text/plain"), "not in UTF-8"),
    ],
)
def test_text_that_cannot_be_read_is_refused_for_its_own_reason(block: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"type 'document'; .*{reason}"):
        said_by("user", BLUE, block)
    with pytest.warns(BlendragWarning, match=f"left out content of type 'document': .*{reason}"):
        assert said_by("assistant", block, BLUE) == "It is blue."
    with pytest.raises(ConfigError, match=f"type 'document'; .*{reason}"):
        said_by("user", block, DocumentBlock(data=b"%PDF", document_mimetype="application/pdf"))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_mark_of_an_encoding_is_no_text(encoding: str) -> None:
    block = DocumentBlock(data="größe".encode(encoding), document_mimetype="text/plain")
    assert said_by("user", block) == "größe"


def test_what_a_user_showed_before_ends_no_conversation() -> None:
    shown = ChatMessage(role="user", blocks=[BLUE, PICTURES[0]])
    later = [ChatMessage("A picture.", role="assistant"), ChatMessage("And now?")]
    with pytest.warns(BlendragWarning, match="left out content of type 'image'"):
        assert texts_of(shown, *later)[0] == "It is blue."
    call = ChatMessage(role="assistant", blocks=[SILENT[2]])
    with pytest.raises(ConfigError, match="reads text only"):
        texts_of(shown, call, ChatMessage("r", role="tool"))


def test_text_is_kept_wherever_it_is_nested() -> None:
    notes = DocumentBlock(data=b"from a file", title="notes.md")
    cited = CitableBlock(title="t", source="s", content=[TextBlock(text="cited"), notes])
    citation = CitationBlock(cited_content="quoted", source="s", title="t", additional_location_info={})
    rows = DocumentBlock(data=b'{"a": 1}', document_mimetype="application/json")
    assert said_by("user", cited, citation, rows, BLUE).split("\n") == [
        "t", "cited", "from a file", "quoted", '{"a": 1}', "It is blue.",
    ]  # fmt: skip


def test_refusal_beside_the_blocks_is_what_was_said() -> None:
    refused = ChatMessage(role="assistant", content="", additional_kwargs={"refusal": "I cannot say."})
    assert texts_of(refused) == ["I cannot say."]


ARGUMENTS = '{"city": "Turku"}'
FUNCTION = Function(name="look", arguments=ARGUMENTS)
CALLS: list[dict[str, Any]] = [
    {"tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": ARGUMENTS}}]},
    {"tool_calls": [{"id": "c1", "function": {"name": "look", "arguments": {"city": "Turku"}}}]},
    {"tool_calls": [ChatCompletionMessageFunctionToolCall(id="c1", type="function", function=FUNCTION)]},
    {"tool_calls": [SimpleNamespace(id="c1", function=SimpleNamespace(name="look", arguments=ARGUMENTS))]},
    {"tool_calls": [{"id": "c1", "type": "tool_use", "name": "look", "input": {"city": "Turku"}}]},
    {"tool_calls": [{"id": "c1", "type": "tool_call", "name": "look", "args": {"city": "Turku"}}]},
    {"tool_calls": [ToolSelection(tool_id="c1", tool_name="look", tool_kwargs={"city": "Turku"})]},
    {
        "tool_calls": [
            {"type": "function_call", "id": "f", "call_id": "c1", "name": "look", "arguments": ARGUMENTS}
        ]
    },
    {"tool_calls": [{"toolUseId": "c1", "name": "look", "input": {"city": "Turku"}}]},
    {"function_call": {"id": "c1", "name": "look", "arguments": ARGUMENTS}},
    {"tool_calls": [{"id": "c1", "name": "look", "parameters": {"city": "Turku"}}]},
    {"tool_calls": [SimpleNamespace(id="c1", name="look", parameters=MappingProxyType({"city": "Turku"}))]},
    {"tool_calls": [{"id": "c1", "function": {"name": "look", "arguments": SimpleNamespace(city="Turku")}}]},
]


@pytest.mark.parametrize("more", CALLS)
def test_call_that_another_class_wrote_is_read(more: dict[str, Any]) -> None:
    message = ChatMessage("", role="assistant").model_copy(update={"additional_kwargs": more})
    result = ChatMessage("4", role="tool", additional_kwargs={"tool_call_id": "c1"})
    called, answered = read(message, result)
    assert called["tool_calls"] == [{"id": "c1", "name": "look", "arguments": {"city": "Turku"}}]
    assert (answered["tool_call_id"], answered["name"]) == ("c1", "look")


@pytest.mark.parametrize("id", ["tool_call_id", "call_id", "tool_use_id", "toolUseId"])
def test_result_names_its_call_as_another_class_wrote_it(id: str) -> None:
    message = ChatMessage("", role="assistant", additional_kwargs=CALLS[0])
    _, answered = read(message, ChatMessage("4", role="tool", additional_kwargs={id: "c1", "id": "own"}))
    assert (answered["tool_call_id"], answered["name"]) == ("c1", "look")


@pytest.mark.parametrize(
    "more", [{"tool_calls": None}, {"tool_calls": []}, {"tool_calls": [{"id": "1"}, "look"]}]
)
def test_call_without_a_name_is_none(more: dict[str, Any]) -> None:
    assert "tool_calls" not in plain_messages([ChatMessage("", role="assistant", additional_kwargs=more)])[0]


def test_values_that_json_does_not_know_are_written(llm: BlendLLM) -> None:
    values = {"day": datetime.date(2024, 1, 2), "id": uuid.UUID(int=7), "fee": Decimal("1.50"), "tags": {"a"}}
    block = ToolCallBlock(tool_call_id="1", tool_name="look", tool_kwargs=values)
    result = ChatMessage("r", role="tool", additional_kwargs={"tool_call_id": "1"})
    shown = llm.render([ChatMessage("q"), ChatMessage(role="assistant", blocks=[block]), result])
    assert '"day": "2024-01-02"' in shown and '"fee": "1.50"' in shown and str(uuid.UUID(int=7)) in shown


def test_lone_surrogates_are_replaced(llm: BlendLLM) -> None:
    assert "a � b" in llm.render([ChatMessage("a \ud83d b")])


@pytest.mark.parametrize("ask", [BlendLLM.chat, BlendLLM.stream_chat, BlendLLM.render, BlendLLM.explain])
def test_no_message_at_all_is_refused_by_name(llm: BlendLLM, ask: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="no message"):
        list(ask(llm, []))


def test_nothing_has_no_tokens(llm: BlendLLM) -> None:
    assert llm.token_ids("") == []
