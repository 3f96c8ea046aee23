"""Between LlamaIndex's messages and blendrag's plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    CitableBlock,
    CitationBlock,
    CompletionResponse,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from blendrag.errors import ConfigError

if TYPE_CHECKING:
    from blendrag import Answer

_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Role, text, tool calls and thinking. Raises ConfigError for content that is not text."""
    plain: list[dict[str, Any]] = []
    called: dict[str, str] = {}  # names of functions by call: their results have the id only
    for message in messages:
        role = _ROLES.get(message.role, message.role.value)
        one: dict[str, Any] = {"role": role, "content": _text_of(message.blocks)}
        if calls := _calls_of(message):
            one["tool_calls"] = calls
            called |= {call["id"]: call["name"] for call in calls}
        if role == "assistant" and (thought := _thinking_of(message)):
            one["reasoning_content"] = thought
        if role == "tool":
            id = str(message.additional_kwargs.get("tool_call_id") or "")
            one["tool_call_id"] = id
            if name := message.additional_kwargs.get("name") or called.get(id):
                one["name"] = name
        plain.append(one)
    return plain


def assistant_message(answer: Answer) -> ChatMessage:
    """The model's answer. Calls are blocks; and, for code that looks there, in ``additional_kwargs`` as
    OpenAI writes them."""
    calls = answer.tool_calls
    blocks = message_blocks(answer.reasoning, answer.text if answer.text or not calls else None)
    blocks += [
        ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=call.arguments) for call in calls
    ]
    as_openai = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in calls
    ]
    more = {"tool_calls": as_openai} if calls else {}
    return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=more)


def message_blocks(reasoning: str | None, text: str | None) -> list[Any]:
    """What the model thought, if anything, and what it says."""
    blocks: list[Any] = [ThinkingBlock(content=reasoning)] if reasoning else []
    return blocks if text is None else [*blocks, TextBlock(text=text)]


def as_completion(response: ChatResponse) -> CompletionResponse:
    """A chat's response as a completion's."""
    return CompletionResponse(
        text=response.message.content or "",
        delta=response.delta,
        raw=response.raw,
        logprobs=response.logprobs,
        additional_kwargs=response.additional_kwargs,
    )


def _text_of(blocks: Sequence[Any]) -> str:
    return "\n".join(text for block in blocks if (text := _block_text(block)) is not None)


def _block_text(block: Any) -> str | None:
    match block:
        case TextBlock():
            return block.text
        case CitableBlock():
            return _text_of(block.content)
        case CitationBlock():
            return _block_text(block.cited_content)
        case ThinkingBlock() | CachePoint() | ToolCallBlock():
            return None
    raise ConfigError(f"a message holds content of type {block.block_type!r}; this model reads text only")


def _thinking_of(message: ChatMessage) -> str:
    return "".join(block.content or "" for block in message.blocks if isinstance(block, ThinkingBlock))


def _calls_of(message: ChatMessage) -> list[dict[str, Any]]:
    calls = [
        _call(block.tool_call_id, block.tool_name, block.tool_kwargs)
        for block in message.blocks
        if isinstance(block, ToolCallBlock)
    ]
    if calls:
        return calls
    written = message.additional_kwargs.get("tool_calls") or ()  # by another model's class
    return [
        _call(call.get("id"), call["function"]["name"], call["function"].get("arguments"))
        for call in written
        if isinstance(call, Mapping) and "function" in call
    ]


def _call(id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    return {"id": id or "", "name": name, "arguments": arguments if isinstance(arguments, dict) else {}}
