"""The doors of a server: what each makes of a request, and of our field in it."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from vllm.entrypoints.anthropic.api_router import create_messages
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.api_router import create_chat_completion
from vllm.entrypoints.openai.responses.api_router import create_responses
from vllm.exceptions import VLLMValidationError

from blendrag.server import Limits
from blendrag.server.blending import BlendFields
from blendrag.server.completions import body_of
from blendrag.server.doors import DOORS, Asked, Responses, door_of
from engineless import CHAT, COMPLETION

RESPONSE, MESSAGE = body_of(create_responses), body_of(create_messages)
MARK = {"cache_control": {"type": "ephemeral"}}


def read(kind: type[BaseModel], content: Any, **more: Any) -> Any:
    said = [{"role": "user", "content": content}]
    return kind.model_validate({"model": "m", "messages": said, "input": said, "max_tokens": 8, **more})


def state(**stored: Any) -> Any:
    """That of vLLM's app; of what it has, what says what a request is. stored: responses, by their id."""
    convert = AnthropicServingMessages.to_chat_completion_request
    messages = SimpleNamespace(to_chat_completion_request=convert, _merge_inline_system=False)
    before = {id: [{"role": "user", "content": "Before."}] for id in stored}
    renderer = SimpleNamespace(use_harmony=False)
    stores = {"response_store": stored, "msg_store": before}
    responses = SimpleNamespace(online_renderer=renderer, tool_server=None, **stores)
    return SimpleNamespace(anthropic_serving_messages=messages, openai_serving_responses=responses)


def asked(request: Any, app: Any = None) -> Asked:
    return asyncio.run(door_of(type(request)).asked(request, app or state()))


def test_every_door_is_told_from_the_class_of_its_requests() -> None:
    paths = [door_of(kind).path for kind in (CHAT, COMPLETION, RESPONSE, MESSAGE)]
    assert paths == [door.path for door in DOORS]


@pytest.mark.parametrize("kind", [CHAT, RESPONSE, MESSAGE], ids=["chat", "response", "message"])
def test_text_of_a_marked_part_is_a_document(kind: type[BaseModel]) -> None:
    name = "input_text" if kind is RESPONSE else "text"
    parts = [{"type": name, "text": "A fjord.", **MARK}, {"type": name, "text": "Where?"}]
    request = read(kind, parts)
    assert request.blendrag.marked == ("A fjord.",)
    assert [part["text"] for part in asked(request).parts()] == ["A fjord.", "Where?"]
    assert read(kind, parts[1:]).blendrag is None
    assert read(kind, parts, blendrag={"quality": "fast"}).blendrag.quality == "fast"


@pytest.mark.parametrize("mark", [None, True, "ephemeral", []])
def test_mark_that_is_none_means_nothing(mark: Any) -> None:
    assert read(MESSAGE, [{"type": "text", "text": "A.", "cache_control": mark}]).blendrag is None


def test_marked_image_is_no_document() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QQ=="}}
    request = read(MESSAGE, [{**image, **MARK}])
    assert request.blendrag is None
    assert "other than text" in str(asked(request).plain)


def test_more_marked_texts_than_a_request_may_name_are_passed_over() -> None:
    kind = body_of(create_chat_completion, Limits(items=3, text_mib=1))
    for length, kept in ((9, "abc"), (700_000, "a")):
        parts = [{"type": "text", "text": letter * length, **MARK} for letter in "abcde"]
        assert "".join(text[0] for text in read(kind, parts).blendrag.marked) == kept


DOCUMENTS = [
    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A fjord."}},
    {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "A fjord."}]}},
    {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "A fjord."}]},
]


@pytest.mark.parametrize("nested", [False, True], ids=["said", "of a tool"])
@pytest.mark.parametrize("document", DOCUMENTS)
def test_anthropics_documents_are_text_to_the_model(document: dict[str, Any], nested: bool) -> None:
    part = {"type": "tool_result", "tool_use_id": "c", "content": [document]} if nested else document
    request = read(MESSAGE, [part])
    (message,) = asked(request).sent
    title = "".join(f"{document[name]}\n" for name in ("title",) if name in document)
    assert (message["role"], message["content"]) == ("tool" if nested else "user", f"{title}A fjord.")
    assert request.blendrag.marked == ("A fjord.",)


@pytest.mark.parametrize("source", [3, None, [], {}, {"type": "text"}, {"type": "url", "url": "http://x"}])
def test_document_without_text_leaves_the_conversation_going(source: Any) -> None:
    request = read(MESSAGE, [{"type": "document", "source": source}, {"type": "text", "text": "Hm?"}])
    assert asked(request).sent == [{"role": "user", "content": "Hm?"}]
    assert request.blendrag is None


def test_response_goes_on_from_the_one_that_is_named() -> None:
    app = state(first=SimpleNamespace(id="first", output=[]))
    said = asked(read(RESPONSE, "And?", previous_response_id="first"), app).sent
    assert [message["content"] for message in said] == ["Before.", "And?"]
    with pytest.raises(LookupError):
        asked(read(RESPONSE, "And?", previous_response_id="second"), app)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search_preview"}]}, "tools the server runs"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {}, "strict": None}]}, None),
    ],
)
def test_response_that_cannot_be_planned_says_why(more: dict[str, Any], reason: str | None) -> None:
    app = state()
    app.openai_serving_responses.tool_server = object()
    plain = asked(read(RESPONSE, "Hm?", **more), app).plain
    assert plain is None if reason is None else reason in str(plain)


def test_tool_that_no_server_runs_leaves_a_response_to_be_planned() -> None:
    assert asked(read(RESPONSE, "Hm?", tools=[{"type": "web_search"}])).plain is None


FILE = {"type": "input_file", "file_data": "data:text/plain;base64,aGVsbG8="}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def said(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [*parts], **more}


@pytest.mark.parametrize(
    ("items", "told"),
    [
        ([{"role": "user", "content": [FILE]}], ["user: hello"]),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], ["user: a"]),
        ([{"role": "user", "content": [DOCUMENTS[2]]}], ["user: t\nA fjord."]),
        ([CALL, {"type": "function_call_output", "call_id": "c", "output": [FILE]}], ["tool: hello"]),
        ([CALL, {"type": "custom_tool_call_output", "call_id": "c", "output": [FILE]}], ["tool: hello"]),
        ([{**CALL, "arguments": {"of": 1}}, {"type": "function_call_output", "call_id": "c", "output": 5}],
         ["tool: 5"]),
        ([{**CALL, "arguments": None}, {"type": "function_call_output", "call_id": "c", "output": None}], []),
        ([said({"type": "refusal", "refusal": "No."}, type="message")], ["assistant: No."]),
        ([said(type="message"), said()], []),
        ([said({"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"})],
         ["assistant: a\nb"]),
        ([said({"type": "input_text", "text": "a"}, id="m", status="completed")], ["assistant: a"]),
        ([{"role": "assistant", "content": "a"}], ["assistant: a"]),
        ([{"type": "reasoning", "encrypted_content": "x", "summary": []}, said({"type": "x", "text": "a"})],
         ["assistant: a"]),
        ([{"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "x"}}], []),
        ([{"type": "compaction", "encrypted_content": "x"}, {"type": "additional_tools", "tools": []}], []),
        ([{"type": "mcp_call", "id": "m", "name": "n", "server_label": "s", "output": "a"}],
         ["assistant: a"]),
        ([{"type": "file_search_call", "results": [{"text": "a"}, {"text": "b"}]}], ["assistant: a\nb"]),
        ([{"type": "apply_patch_call", "call_id": "c", "operation": {"path": "x"}},
          {"type": "apply_patch_call_output", "call_id": "c", "output": "a"}], ["assistant: a"]),
        ([{"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a", "stderr": ""}]}],
         ["assistant: a"]),
        ([{"type": "unheard-of", "text": "a"}], ["assistant: a"]),
    ],
)  # fmt: skip
def test_history_of_responses_keeps_its_texts_whatever_is_between(items: list[Any], told: list[str]) -> None:
    first, last = ({"role": "user", "content": text} for text in ("Before.", "Behind."))
    found = asked(RESPONSE.model_validate({"model": "m", "input": [first, *items, last]}))
    assert found.plain is None
    texts = [
        content if isinstance(content := message.get("content"), str) else content[0]["text"]
        for message in found.sent
        if message.get("content")
    ]
    roles = [message["role"] for message in found.sent if message.get("content")]
    both = [f"{role}: {text}" for role, text in zip(roles, texts, strict=True)]
    assert both == ["user: Before.", *told, "user: Behind."]


@pytest.mark.parametrize("output", [{"of": "Ö"}, [{"of": "Ö"}, 2]], ids=["object", "list"])
def test_data_that_a_tool_gave_is_json_through_every_door(output: Any) -> None:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": output}
    message = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    response = [CALL, {"type": "function_call_output", "call_id": "c", "output": output}]
    for request in (read(MESSAGE, "?", messages=message), read(RESPONSE, "?", input=response)):
        *_, told = asked(request).sent
        assert (told["role"], told["content"]) == ("tool", json.dumps(output, ensure_ascii=False))


@pytest.mark.parametrize("content", ["Hm?", [{"role": "user", "content": "Hm?"}]], ids=["text", "items"])
def test_null_in_a_response_is_what_was_not_given(content: Any) -> None:
    nulls = dict.fromkeys(RESPONSE.model_fields.keys() - {"input"})
    request = RESPONSE.model_validate({**nulls, "input": content})
    assert request.tool_choice == RESPONSE.model_validate({"input": content}).tool_choice


def test_item_that_only_names_another_is_the_clients_mistake() -> None:
    request = RESPONSE.model_validate({"model": "m", "input": [{"type": "item_reference", "id": "m"}]})
    with pytest.raises(VLLMValidationError, match="item_reference"):
        asked(request)


@pytest.mark.parametrize(
    "item",
    [
        {"type": "message", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "input_text", "text": "Hi"},
        {"type": "text", "text": "Hi"},
        {"type": "image_url", "image_url": {"url": "http://x"}, "text": "Hi"},
        {"type": "human", "role": "user", "content": "Hi"},
        {"role": "user", "content": [{"type": "video_url", "video_url": {"url": "http://x"}}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}]},
    ],
)
def test_what_vllm_cannot_read_of_a_user_is_refused_and_becomes_no_words_of_the_model(item: Any) -> None:
    with pytest.raises(ValidationError):
        RESPONSE.model_validate({"model": "m", "input": [{"role": "user", "content": "Before."}, item]})


def test_input_of_which_nothing_is_left_is_refused_in_a_line() -> None:
    with pytest.raises(ValidationError, match="input has no item with text") as caught:
        RESPONSE.model_validate({"model": "m", "input": [{"type": "compaction", "encrypted_content": "x"}]})
    assert caught.value.error_count() == 1


@pytest.mark.parametrize(
    "image", [{"url": "http://x"}, "http://x", {"url": "http://x", "detail": "auto"}], ids=str
)
def test_image_of_a_chat_is_one_of_a_response(image: Any) -> None:
    said = [{"role": "user", "content": [{"type": "image_url", "image_url": image}]}]
    returned = {"type": "function_call_output", "call_id": "c", "output": said[0]["content"]}
    user, _, output = Responses().readable({"input": [*said, CALL, returned]})["input"]
    expected = [{"type": "input_image", "image_url": "http://x", "detail": "auto"}]
    assert user["content"] == output["output"] == expected
    assert "other than text" in str(asked(RESPONSE.model_validate({"model": "m", "input": said})).plain)


def test_response_of_a_model_whose_prompts_vllm_writes_itself_is_plain() -> None:
    app = state()
    app.openai_serving_responses.online_renderer.use_harmony = True
    assert "gpt-oss" in str(asked(read(RESPONSE, "Hm?"), app).plain)


@pytest.mark.parametrize("named", [None, "first", "other~first", "own~first"])
def test_stored_response_is_found_by_its_own_tenant_only(named: str | None) -> None:
    request = read(RESPONSE, "Hm?", request_id="mine", previous_response_id=named)
    Responses().keep_apart(request, "own")
    assert request.request_id == "own~mine"
    assert request.previous_response_id in (None, "own~first", "own~other~first")
    alone = read(RESPONSE, "Hm?", request_id="mine", previous_response_id=named)
    Responses().keep_apart(alone, "")
    assert (alone.request_id, alone.previous_response_id) == ("mine", named)


@pytest.mark.parametrize("part", [3, None, "x", {}, {"type": "input_text"}, {"type": 3}, [[]], {"text": 3}])
@pytest.mark.parametrize("kind", [RESPONSE, MESSAGE], ids=["response", "message"])
def test_malformed_part_is_an_error_of_the_client(kind: type[BaseModel], part: Any) -> None:
    try:
        request = read(kind, [part])
        asked(request)
    except (ValidationError, ValueError, TypeError, LookupError, AttributeError):
        return


@pytest.mark.parametrize("kind", [RESPONSE, MESSAGE], ids=["response", "message"])
def test_long_list_of_malformed_items_is_refused_soon(kind: type[BaseModel]) -> None:
    items = [{"role": "user"}] * 4_000
    begun = time.monotonic()
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({"model": "m", "max_tokens": 8, "messages": items, "input": items})
    assert caught.value.error_count() < 1000
    assert time.monotonic() - begun < 2
    with pytest.raises(ValidationError, match="--max-items"):
        kind.model_validate({"model": "m", "messages": items * 2, "input": items * 2})


# -- the field blendrag of a request's body -------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ({"recompte_ratio": 0.5}, "did you mean recompute_ratio"),
        ({"Evidence": True}, "did you mean evidence"),
        ({"hints": []}, "documents now"),
        ({"recompute_ratio": 1.1}, "between 0 and 1"),
        ({"recompute_ratio": -0.1}, "between 0 and 1"),
        ({"recompute_ratio": "much"}, "valid number"),
        ({"quality": "fst"}, "fast"),
        ({"selector": "hkvd@0.1", "recompute_ratio": 0.2}, "give one ratio"),
        ({"kv_budget": "ada"}, "kv_budget must be a number of tokens"),
        ({"kv_window": 16}, "kv_window is a part of the budget now"),
        ({"metric": "k"}, "metric is an argument of the selector now"),
    ],
)
def test_option_that_cannot_be_used_is_refused_with_what_to_write(said: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValidationError, match=wrong):
        BlendFields.model_validate(said)


def test_nothing_said_is_nothing_asked() -> None:
    fields = BlendFields.model_validate({})
    assert fields.blend is fields.quality is fields.recompute_ratio is fields.selector is None
    assert not fields.evidence
