"""Between LangChain's messages and blendrag's plain data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    InvalidToolCall,
    ToolMessage,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import ToolCall, ToolCallChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from blendrag.errors import ConfigError

if TYPE_CHECKING:
    from blendrag import Answer, Piece

_ROLES = {"system": "system", "human": "user", "ai": "assistant", "tool": "tool", "function": "tool"}


def plain_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Role, text, tool calls and thinking. Raises ConfigError for content that is not text."""
    return [_plain(message) for message in messages]


def _plain(message: BaseMessage) -> dict[str, Any]:
    role = message.role if isinstance(message, ChatMessage) else _ROLES.get(message.type, message.type)
    plain: dict[str, Any] = {"role": role, "content": text_of(message.content)}
    if isinstance(message, AIMessage) and message.tool_calls:
        plain["tool_calls"] = [
            {"id": call["id"], "name": call["name"], "arguments": call["args"]} for call in message.tool_calls
        ]
    if isinstance(message, AIMessage) and (thought := _thinking_of(message)):
        plain["reasoning_content"] = thought
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    if message.name:
        plain["name"] = message.name
    return plain


def _thinking_of(message: AIMessage) -> str:
    """What the model thought, whichever provider's class says so."""
    return "".join(
        str(block.get("reasoning", "")) for block in message.content_blocks if block["type"] == "reasoning"
    )


def text_of(content: str | Sequence[str | dict[str, Any]]) -> str:
    """The text of a message's content, blocks one after the other."""
    if isinstance(content, str):
        return content
    return "".join(_block_text(block) for block in content)


def _block_text(block: str | dict[str, Any]) -> str:
    if isinstance(block, str):
        return block
    match block.get("type"):
        case "text":
            return str(block.get("text", ""))
        case "tool_use" | "tool_call" | "reasoning" | "thinking":  # calls are taken from the message itself
            return ""
        case "json":
            return json.dumps(block.get("json"), ensure_ascii=False)
        case kind:
            raise ConfigError(f"a message holds content of type {kind!r}; this model reads text only")


def document_texts(messages: Sequence[BaseMessage], documents: Iterable[Document | str]) -> tuple[str, ...]:
    """Texts known to be in the prompt: those given, and those that tools attached to their answers."""
    attached = [
        one
        for message in messages
        if isinstance(message, ToolMessage) and isinstance(message.artifact, list | tuple)
        for one in message.artifact
        if isinstance(one, Document)
    ]
    texts = [one if isinstance(one, str) else one.page_content for one in [*documents, *attached]]
    return tuple(dict.fromkeys(filter(None, (text.strip() for text in texts))))


def usage_metadata(answer: Answer) -> UsageMetadata:
    usage = answer.usage
    details = {
        "cache_read": usage.cache_read,
        "cache_creation": usage.cache_creation,
        "blend_recomputed": usage.recomputed,
    }
    return UsageMetadata(
        input_tokens=usage.input,
        output_tokens=usage.output,
        total_tokens=usage.total,
        input_token_details=InputTokenDetails(**details),  # type: ignore[typeddict-item]
    )


def response_metadata(answer: Answer) -> dict[str, Any]:
    """Model, why it ended, log probabilities if asked for, and the evidence of what was computed."""
    metadata: dict[str, Any] = {
        "model_name": answer.model,
        "finish_reason": answer.finish_reason,
        "blendrag": answer.facts(),
    }
    if answer.logprobs:
        metadata["logprobs"] = {
            "content": [
                {
                    "token": one.token,
                    "logprob": one.logprob,
                    "top_logprobs": [{"token": token, "logprob": logprob} for token, logprob in one.top],
                }
                for one in answer.logprobs
            ]
        }
    return metadata


def tool_calls(answer: Answer) -> list[ToolCall]:
    return [ToolCall(name=c.name, args=c.arguments, id=c.id, type="tool_call") for c in answer.tool_calls]


def tool_call_chunks(answer: Answer) -> list[ToolCallChunk]:
    """Every call whole: only a whole one is known to be a call."""
    return [
        ToolCallChunk(
            name=c.name, args=json.dumps(c.arguments, ensure_ascii=False), id=c.id, index=index,
            type="tool_call_chunk",
        )
        for index, c in enumerate(answer.tool_calls)
    ]  # fmt: skip


def invalid_tool_calls(answer: Answer, *, quoted: bool = False) -> list[InvalidToolCall]:
    """``quoted``: as a JSON string, which LangChain does not complete to a call when it adds chunks up."""
    return [
        InvalidToolCall(
            name=None,
            args=json.dumps(c.text) if quoted else c.text,
            id=None,
            error=c.reason,
            type="invalid_tool_call",
        )
        for c in answer.invalid_tool_calls
    ]


def _thinking(reasoning: str | None) -> dict[str, str]:
    """Where LangChain looks for the ``reasoning`` block of a message."""
    return {"reasoning_content": reasoning} if reasoning else {}


def chat_result(answer: Answer) -> ChatResult:
    """The whole answer."""
    message = AIMessage(
        content=answer.text,
        additional_kwargs=_thinking(answer.reasoning),
        tool_calls=tool_calls(answer),
        invalid_tool_calls=invalid_tool_calls(answer),
        usage_metadata=usage_metadata(answer),
        response_metadata=response_metadata(answer),
    )
    return ChatResult(generations=[ChatGeneration(message=message)])


def chat_chunk(piece: Piece) -> ChatGenerationChunk:
    """A piece of the answer; the last one has what is known of the whole."""
    if piece.answer is None:
        message = AIMessageChunk(content=piece.text, additional_kwargs=_thinking(piece.reasoning))
        return ChatGenerationChunk(message=message)
    return ChatGenerationChunk(
        message=AIMessageChunk(
            content=piece.text,
            additional_kwargs=_thinking(piece.reasoning),
            tool_call_chunks=tool_call_chunks(piece.answer),
            invalid_tool_calls=invalid_tool_calls(piece.answer, quoted=True),
            usage_metadata=usage_metadata(piece.answer),
            response_metadata=response_metadata(piece.answer),
            chunk_position="last",
        )
    )
