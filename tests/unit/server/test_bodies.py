"""Bodies of vLLM's requests, with a field that is ours."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from vllm.entrypoints.openai.chat_completion.api_router import create_chat_completion
from vllm.entrypoints.openai.completion.api_router import create_completion

from blendrag.server import Limits
from blendrag.server.blending import _unplanned, is_chat
from blendrag.server.completions import body_of

CHAT, COMPLETION = body_of(create_chat_completion), body_of(create_completion)
IMAGE = {"type": "image_url", "image_url": {"url": "x"}, "uuid": "theirs"}


def read(kind: type[BaseModel], **fields: Any) -> Any:
    return kind.model_validate(
        {"messages": [{"role": "user", "content": "Hello."}], "prompt": "Hello.", **fields}
    )


def test_completion_with_messages_is_a_chat() -> None:
    """vLLM allows fields that it does not know. Planned by these, it would have KV of another prompt."""
    assert is_chat(type(read(CHAT)))
    assert not is_chat(type(read(COMPLETION)))


@pytest.mark.parametrize("parts", [[], [IMAGE], [IMAGE, {"type": "x"}], [{"type": "text"}], ["text"]])
def test_contents_are_read_after_they_were_looked_at(parts: list[Any]) -> None:
    """Once, by whoever comes first: images would not be seen."""
    try:
        request = read(CHAT, messages=[{"role": "user", "content": parts}])
    except ValidationError:
        return
    assert isinstance(request.messages[0]["content"], list)
    assert request.model_copy(deep=True).messages == request.messages


@pytest.mark.parametrize("kind", [CHAT, COMPLETION])
@pytest.mark.parametrize("value", [[], "x", [[]], 3, {"x": []}])
@pytest.mark.parametrize("name", ["structured_outputs", "response_format", "stream_options", "blendrag"])
def test_value_of_a_wrong_kind_is_an_error_of_the_server(
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
    "part",
    [
        IMAGE,
        {"type": "text", "text": "Hello.", "image_url": None},
        {"image_url": "http://x"},
    ],
)
def test_prompt_is_planned_whose_token_ids_vllm_ignores(part: dict[str, Any]) -> None:
    """It would be another prompt than that of the recipe."""
    request = read(CHAT, messages=[{"role": "user", "content": [{"type": "text", "text": "Hello."}, part]}])
    assert _unplanned(request) == "prompts with other than text are prefilled plainly"
    assert (
        _unplanned(read(CHAT, messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}]))
        is None
    )


@pytest.mark.parametrize("name", ["documents", "conversation", "selector"])
def test_text_that_cannot_be_encoded_is_read(name: str) -> None:
    """What looks for a document, or names a conversation, would raise in the middle of it."""
    half: Any = ["a\ud800b"] if name == "documents" else "a\ud800b"
    with pytest.raises(ValidationError, match="surrogates not allowed"):
        read(CHAT, blendrag={name: half})


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
