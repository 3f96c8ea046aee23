"""Bodies of vLLM's requests, with a field that is ours."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from vllm.entrypoints.openai.chat_completion.api_router import create_chat_completion
from vllm.entrypoints.openai.responses.api_router import create_responses
from vllm.exceptions import VLLMValidationError

from blendrag.server import Limits
from blendrag.server.completions import _once, _repeated, body_of
from blendrag.server.doors import door_of
from engineless import CHAT, COMPLETION

TEXT_A = {"type": "text", "text": "A."}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}, "uuid": "theirs"}


def read(kind: type[BaseModel], **fields: Any) -> Any:
    return kind.model_validate(
        {"messages": [{"role": "user", "content": "Hello."}], "prompt": "Hello.", **fields}
    )


def plain_of(request: Any) -> str | None:
    """Why it goes to vLLM as it is."""
    return asyncio.run(door_of(type(request)).asked(request, None)).plain


@pytest.mark.parametrize("parts", [[], [IMAGE], [IMAGE, {"type": "x"}], [{"type": "text"}], ["text"]])
def test_contents_can_be_read_again_after_they_were_looked_at(parts: list[Any]) -> None:
    """An iterator gives them once, to whoever comes first: images would not be seen."""
    try:
        request = read(CHAT, messages=[{"role": "user", "content": parts}])
    except ValidationError:
        return
    assert isinstance(request.messages[0]["content"], list)
    assert request.model_copy(deep=True).messages == request.messages


@pytest.mark.parametrize("kind", [CHAT, COMPLETION])
@pytest.mark.parametrize("value", [[], "x", [[]], 3, {"x": []}])
@pytest.mark.parametrize("name", ["structured_outputs", "response_format", "stream_options", "blendrag"])
def test_value_of_a_wrong_kind_is_an_error_of_the_client(
    kind: type[BaseModel], name: str, value: Any
) -> None:
    """vLLM's own checks raise AttributeErrors and the like of them."""
    try:
        read(kind, **{name: value})
    except (ValidationError, TypeError):
        pass
    except Exception as error:
        assert type(error).__name__ == "VLLMValidationError"


@pytest.mark.parametrize(
    "part", [IMAGE, {"type": "text", "text": "Hello.", "image_url": None}, {"image_url": "http://x"}]
)
def test_prompt_whose_token_ids_vllm_ignores_is_not_planned(part: dict[str, Any]) -> None:
    """It would be another prompt than that of the recipe."""
    request = read(CHAT, messages=[{"role": "user", "content": [{"type": "text", "text": "Hello."}, part]}])
    assert plain_of(request) == "prompts with other than text are prefilled plainly"
    text = read(CHAT, messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}])
    assert plain_of(text) is None


def test_prompt_that_is_a_list_of_one_text_is_that_text() -> None:
    async def render(copy: Any, **_: Any) -> Any:
        assert copy.prompt == "Hello."
        return [{"prompt_token_ids": [1, 2]}]

    renderer = SimpleNamespace(render_completion=render)
    request = read(COMPLETION, prompt=["Hello."])
    found = asyncio.run(door_of(COMPLETION).asked(request, SimpleNamespace(online_renderer=renderer)))
    assert (found.sent, found.plain, asyncio.run(found.render())) == ("Hello.", None, [1, 2])
    for prompt in (["Hello.", "Hi."], [1, 2], [[1, 2]]):
        assert "prefilled plainly" in str(plain_of(read(COMPLETION, prompt=prompt)))


@pytest.mark.parametrize("kind", [CHAT, COMPLETION])
def test_text_that_cannot_be_encoded_is_replaced_wherever_it_stands(kind: type[BaseModel]) -> None:
    """What looks for a document, or names a conversation, would raise in the middle of it."""
    half = "a\ud800b"
    call = {"id": half, "type": "function", "function": {"name": half, "arguments": half}}
    messages = [{"role": "user", "content": half}, {"role": "assistant", "tool_calls": [call]}]
    ours = {"documents": [half], "conversation": half, "selector": half}
    said = read(kind, messages=messages, prompt=half, stop=[half], blendrag=ours).model_dump_json()
    assert half.encode("utf-8", "surrogatepass") not in said.encode()
    assert said.count("a\ufffdb") >= 5


@pytest.mark.parametrize(
    ("body", "times", "left"),
    [
        ({"n": 2, "temperature": 0}, 2, 1), ({"n": 2, "temperature": 0.5}, 1, 2), ({"temperature": 0}, 1, 1),
        ({"n": 2}, 1, 2), ({"n": 1000, "temperature": 0}, 1, 1000),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [CHAT, COMPLETION])
def test_several_equal_answers_are_generated_once(
    kind: type[BaseModel], body: dict[str, Any], times: int, left: int
) -> None:
    request = read(kind, **body)
    assert (_once(request), request.n) == (times, left)


def test_answers_given_several_times_have_places_of_their_own_and_are_counted() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    answer = {"id": "x", "choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}], "usage": usage}
    twice = _repeated(answer, 2)
    assert [(one["index"], one["text"]) for one in twice["choices"]] == list(enumerate("aabb"))
    assert twice["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}
    assert _repeated(answer, 1) == answer


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
@pytest.mark.parametrize(
    ("part", "kept"),
    [
        ({"type": "reasoning", "text": "Hm."}, [{"type": "text", "text": "Hm."}]),
        ({"type": "server_tool_use", "id": "a", "name": "b", "input": {}}, []),
        ({"type": "redacted_thinking", "data": "x"}, []), ({"type": "cachePoint"}, []),
        ({"type": "search_result", "source": "s", "content": [{"type": "text", "text": "a"}, "b", {"x": 1}]},
         [{"type": "text", "text": "a\nb"}]),
        ({"type": "document", "title": "T", "context": "of 2024", "source": {"type": "text", "data": "a"}},
         [{"type": "text", "text": "T\nof 2024\na"}]),
        ({"type": "file", "file": {"filename": "f", "file_data": "data:text/plain;base64,aGVsbG8="}},
         [{"type": "text", "text": "hello"}]),
        ({"type": "file", "file": {"file_data": "data:text/plain;charset=utf-8,a%20b"}},
         [{"type": "text", "text": "a b"}]),
        ({"type": "file", "file": {"file_data": "data:text/plain; Base64;charset=utf-8,aGVsbG8="}},
         [{"type": "text", "text": "hello"}]),
        ({"type": "document", "document": {"data": "a"}}, [{"type": "text", "text": "a"}]),
        ({"type": "document", "source": {"type": "custom", "content": [{"text": "x"}]}},
         [{"type": "text", "text": "x"}]),
        ({"type": "image", "source": {"data": "iVBOR", "media_type": "image/png"}}, []),
        ({"type": "file", "file": "file-abc123"}, []),
        ({"type": "resource", "resource": {"uri": "u", "text": "a"}}, [{"type": "text", "text": "a"}]),
        ({"type": "file_search_call", "results": [{"text": "a"}, {"text": "b"}]},
         [{"type": "text", "text": "a\nb"}]),
        ({"type": "code_interpreter_call", "outputs": [{"type": "logs", "logs": "a"}]},
         [{"type": "text", "text": "a"}]),
        ({"type": "bash_code_execution_tool_result", "content": {"stdout": "a", "stderr": "b"}},
         [{"type": "text", "text": "a\nb"}]),
        ({"type": "document", "source": {"type": "base64", "media_type": "text/plain", "data": "aGVsbG8="}},
         [{"type": "text", "text": "hello"}]),
        ({"type": "document", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}, []),
        ({"type": "non_standard", "value": {"text": "x"}}, []),
        ({"type": "executable_code", "code": "x"}, []),
        ({"type": "input_text", "text": "Hm."}, [{"type": "text", "text": "Hm."}]),
        ({"type": "output_text", "text": "Hm."}, [{"type": "text", "text": "Hm."}]),
    ],
)  # fmt: skip
def test_part_of_another_providers_leaves_the_conversation_going(
    role: str, part: dict[str, Any], kept: list[Any]
) -> None:
    first = {"type": "text", "text": "A."}
    message = {"role": role, "content": [first, part], **({"tool_call_id": "x"} if role == "tool" else {})}
    request = read(CHAT, messages=[message, {"role": "user", "content": "Go on."}])
    assert [*request.messages[0]["content"]] == [first, *kept]


@pytest.mark.parametrize(
    ("role", "content", "kept"),
    [
        ("user", ["A.", {"text": "B."}], [TEXT_A, {"type": "text", "text": "B."}]),
        ("user", [["A."], [[TEXT_A]]], [TEXT_A, TEXT_A]),
        ("user", None, ""),
        ("tool", None, ""),
        ("tool", {"type": "inn", "of": "Ö"}, '{"type": "inn", "of": "Ö"}'),
        ("tool", [{"title": "T", "of": [1]}, 2], '[{"title": "T", "of": [1]}, 2]'),
        ("tool", [{"text": "A."}, {"image_url": {"url": "x"}}], [TEXT_A, {"image_url": {"url": "x"}}]),
    ],
)
def test_content_of_looser_clients_is_read_as_it_is_meant(role: str, content: Any, kept: Any) -> None:
    message = {"role": role, "content": content, **({"tool_call_id": "x"} if role == "tool" else {})}
    assert read(CHAT, messages=[message]).messages[0]["content"] == kept


@pytest.mark.parametrize("arguments", [{"arguments": {"x": "Ö"}}, {"arguments": '{"x": "Ö"}'}, {}])
@pytest.mark.parametrize("named", [{}, {"id": None, "type": None}, {"id": "1", "type": "function"}])
def test_call_of_a_history_is_read_however_much_of_its_form_it_has(
    arguments: dict[str, Any], named: dict[str, Any]
) -> None:
    said = {"role": "assistant", "tool_calls": [{**named, "function": {"name": "look", **arguments}}]}
    (call,) = read(CHAT, messages=[said]).messages[0]["tool_calls"]
    assert (call["id"], call["type"]) == (named.get("id") or "look", "function")
    assert call["function"]["arguments"] == ('{"x": "Ö"}' if arguments else "{}")


def test_call_of_a_custom_tool_leaves_the_conversation_going() -> None:
    custom = {"id": "a", "type": "custom", "custom": {"name": "patch", "input": "Ö\n"}}
    (call,) = read(CHAT, messages=[{"role": "assistant", "tool_calls": [custom]}]).messages[0]["tool_calls"]
    called = {"name": "patch", "arguments": '{"input": "Ö\\n"}'}
    assert call == {"id": "a", "type": "function", "function": called}


def test_message_of_any_age_of_openais_keeps_its_words_and_calls() -> None:
    called = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}}
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    result = {"role": "function", "name": "look", "content": "sky"}
    user = {"role": "user", "content": "Go on."}
    call, tool, said, _ = read(CHAT, messages=[called, result, refused, user]).messages
    assert next(iter(call["tool_calls"]))["function"]["name"] == "look"
    assert (tool["role"], tool["tool_call_id"], said["content"]) == ("tool", "look", "No.")


@pytest.mark.parametrize("image", [IMAGE, {"type": "picture", "image_url": {"url": "x"}}])
def test_image_is_kept(image: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": [image]}]}
    assert door_of(CHAT).readable(body) == body


@pytest.mark.parametrize("spelling", [{}, {"parameters": None}, {"parameters": {}}])
def test_tool_without_parameters_has_none_that_a_template_could_look_into(spelling: dict[str, Any]) -> None:
    function = {"name": "clock", **spelling}
    (tool,) = read(CHAT, tools=[{"type": "function", "function": function}]).tools
    response = {"input": "Hello.", "tools": [{"type": "function", **function}]}
    (flat,) = body_of(create_responses).model_validate(response).tools
    assert tool.function.parameters == flat.parameters == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    "choice", [{}, {"tool_choice": "auto"}, {"tool_choice": {"type": "auto"}}, {"tool_choice": "none"}]
)
def test_list_of_no_tools_is_none(choice: dict[str, Any]) -> None:
    request = read(CHAT, tools=[], **choice)
    assert not request.tools and request.tool_choice == "none"
    with pytest.raises(VLLMValidationError):
        read(CHAT, tools=[], tool_choice="required")


@pytest.mark.parametrize("tools", [3, [3], [{"function": 3}], [{"type": "function"}], {}, None])
def test_what_is_no_tool_is_an_error_of_the_client(tools: Any) -> None:
    with contextlib.suppress(ValidationError, VLLMValidationError):
        read(CHAT, tools=tools)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": [{"role": "user", "content": "x"}] * 11}, "11 messages.*--max-items"),
        ({"messages": [], "blendrag": {"documents": ["x"] * 11}}, "11 documents.*--max-items"),
        ({"messages": [], "blendrag": {"documents": ["x" * (1 << 20), "y"]}}, "--max-text-mib"),
        ({"messages": [{}] * 200}, "mistakes"),
    ],
    ids=["messages", "documents", "long documents", "mistakes"],
)
def test_request_that_holds_too_much_is_refused_by_the_option_that_allows_more(
    body: dict[str, Any], said: str
) -> None:
    small = body_of(create_chat_completion, Limits(items=200 if said == "mistakes" else 10, text_mib=1))
    with pytest.raises(ValidationError, match=said) as caught:
        small.model_validate(body)
    assert caught.value.error_count() == 1
