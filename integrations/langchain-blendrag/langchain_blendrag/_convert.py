"""Conversion between LangChain's messages and blendrag's plain data."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    ToolMessage,
    message_chunk_to_message,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from blendrag.errors import BlendragWarning, ConfigError
from langchain_blendrag._content import CALLS, is_media, kind_of, text_of

if TYPE_CHECKING:
    from blendrag import Answer, Piece

PROVIDER = "blendrag"

# LangChain's types of messages, and roles of other providers.
_ROLES = {
    "human": "user", "ai": "assistant", "function": "tool", "developer": "system", "model": "assistant"
}  # fmt: skip


def plain_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Return role, text, tool calls and thinking of each message. What has no text is left out of turns that
    were answered already, with a warning that counts it.

    Raises ConfigError for a picture, a recording or a file in what the user asks now.
    """
    left_out: Counter[str] = Counter()
    messages = [message_chunk_to_message(message) for message in messages]  # a stream's sum has its own type
    answered = (isinstance(one, AIMessage) and not one.tool_calls for one in messages)  # calls are no answers
    asked = max((place for place, ends in enumerate(answered, 1) if ends), default=0)
    plain = []
    for place, message in enumerate(messages):
        if isinstance(message, RemoveMessage):
            continue
        missed: Counter[str] = Counter()
        plain.append(_plain(message, missed))
        if isinstance(message, HumanMessage) and place >= asked:
            for kind in filter(is_media, missed):
                raise ConfigError(f"a message holds content of type {kind!r}; this model reads text only")
        left_out += missed
    if left_out:
        counted = ", ".join(f"{kind} ({count})" for kind, count in sorted(left_out.items()))
        warnings.warn(f"left out, as having no text: {counted}", BlendragWarning, stacklevel=5)
    return plain


def _plain(message: BaseMessage, left_out: Counter[str]) -> dict[str, Any]:
    role = message.role if isinstance(message, ChatMessage) else message.type
    text = text_of(message.content, left_out, streamed=isinstance(message, AIMessage))
    plain: dict[str, Any] = {"role": _ROLES.get(role, role), "content": text}
    if isinstance(message, AIMessage):
        more = message.additional_kwargs  # of OpenAI's classes
        audio = more.get("audio")
        said = more.get("refusal"), audio.get("transcript") if isinstance(audio, Mapping) else None
        plain["content"] = text or next((one for one in said if isinstance(one, str)), "")
        left_out.update("invalid_tool_call" for _ in message.invalid_tool_calls)
        if message.tool_calls:
            plain["tool_calls"] = [
                {"id": call["id"], "name": call["name"], "arguments": call["args"]}
                for call in message.tool_calls
            ]
        elif isinstance(call := more.get("function_call"), Mapping) and not message.invalid_tool_calls:
            plain["tool_calls"] = [{"id": None, **call}]
        elif isinstance(message.content, list):  # of a history that was written by hand
            left_out.update(kind for kind in map(kind_of, message.content) if kind in CALLS)
        if thought := _thinking_of(message):
            plain["reasoning_content"] = thought
    if isinstance(message, ToolMessage):
        if _is_data(message.content, text):
            plain["content"] = json.dumps(message.content, ensure_ascii=False, default=str)
            left_out.clear()
        plain["tool_call_id"] = message.tool_call_id
    if message.name:
        plain["name"] = message.name
    return plain


# Keys beside the one of a provider's block that has no type.
_BESIDE = {"cachePoint", "cache_control", "thought", "thoughtSignature", "thought_signature"}


def _is_data(content: Any, text: str) -> bool:
    """Return whether what a tool gave is plain data: no blocks of any provider, which have a type or one key,
    nor pictures of Bedrock's."""
    if not isinstance(content, list) or not all(
        isinstance(one, Mapping)
        and "type" not in one
        and not (is_media(kind_of(one)) and isinstance(one[kind_of(one)], Mapping))
        for one in content or [None]
    ):
        return False
    return not text or any(len(one.keys() - _BESIDE) > 1 for one in content)


def _thinking_of(message: AIMessage) -> str:
    """Return what the model thought, whichever provider's class says so."""
    try:
        blocks = message.content_blocks
    except Exception:  # providers' translators fail in their own ways at what they do not know
        return ""
    return "".join(str(block.get("reasoning", "")) for block in blocks if block["type"] == "reasoning")


def document_texts(
    messages: Sequence[BaseMessage], documents: Document | str | Iterable[Document | str]
) -> tuple[str, ...]:
    """Return the texts known to be in the prompt: those given, and those that tools attached to their
    answers. Raises ConfigError for what is no text."""
    attached = [
        one
        for message in messages
        if isinstance(message, ToolMessage) and isinstance(message.artifact, list | tuple)
        for one in message.artifact
        if isinstance(one, Document)
    ]
    alone = isinstance(documents, str | Document) or not isinstance(documents, Iterable)
    given = [documents] if alone else documents
    texts = [one.page_content if isinstance(one, Document) else one for one in [*given, *attached]]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"documents has to be texts or documents, not {documents!r}")
    return tuple(dict.fromkeys(filter(None, (text.strip() for text in texts))))


def usage_metadata(answers: Sequence[Answer]) -> UsageMetadata:
    """Return what several answers to one prompt took: the prompt counts once."""
    usage, output = answers[0].usage, sum(answer.usage.output for answer in answers)
    details = {
        "cache_read": usage.cache_read,
        "cache_creation": usage.cache_creation,
        "blend_recomputed": usage.recomputed,
    }
    return UsageMetadata(
        input_tokens=usage.input,
        output_tokens=output,
        total_tokens=usage.input + output,
        input_token_details=InputTokenDetails(**details),  # type: ignore[typeddict-item]
    )


def response_metadata(answer: Answer) -> dict[str, Any]:
    """Return model, why it ended, log probabilities if asked for, and the evidence of what was computed."""
    metadata: dict[str, Any] = {
        "model_name": answer.model,
        "model_provider": PROVIDER,
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


def _thinking(reasoning: str | None) -> dict[str, str]:
    """Return the thinking, where LangChain looks for the ``reasoning`` block of a message."""
    return {"reasoning_content": reasoning} if reasoning else {}


def chat_result(answers: Sequence[Answer]) -> ChatResult:
    """Return whole answers to one prompt. As with other providers, each says what all of them took."""
    usage = usage_metadata(answers)
    return ChatResult(generations=[ChatGeneration(message=_message(answer, usage)) for answer in answers])


def _invalid(answer: Answer) -> list[Any]:
    """Return the calls that have no name or arguments: an agent ends where it gets one."""
    return [one for one in answer.invalid_tool_calls if not one.call]


def _message(answer: Answer, usage: UsageMetadata) -> AIMessage:
    return AIMessage(
        content=answer.text,
        additional_kwargs=_thinking(answer.reasoning),
        tool_calls=[tool_call(name=c.name, args=c.arguments, id=c.id) for c in answer.named_calls],
        invalid_tool_calls=[invalid_tool_call(args=c.text, error=c.reason) for c in _invalid(answer)],
        usage_metadata=usage,
        response_metadata=response_metadata(answer),
    )


def chat_chunks(piece: Piece) -> Iterator[ChatGenerationChunk]:
    """Yield a piece of the answer, if it has something; the last one has what is known of the whole. Invalid
    calls come before it: of a message's last chunk, LangChain's events have no such calls."""
    said: dict[str, Any] = {"content": piece.text, "additional_kwargs": _thinking(piece.reasoning)}
    answer = piece.answer
    if answer is None:
        if piece.text or piece.reasoning:
            yield ChatGenerationChunk(message=AIMessageChunk(**said))
        return
    # A line why it is no call, then what came: LangChain completes a text that begins as JSON to a call, and
    # has no other place for the reason.
    none = [
        tool_call_chunk(args=f"{c.reason}\n{c.text}", index=index)
        for index, c in enumerate(_invalid(answer), len(answer.named_calls))
    ]
    if none:
        yield ChatGenerationChunk(message=AIMessageChunk(**said, tool_call_chunks=none))
        said = {"content": ""}
    whole = [  # only those are known to be calls
        tool_call_chunk(name=c.name, args=json.dumps(c.arguments, ensure_ascii=False), id=c.id, index=index)
        for index, c in enumerate(answer.named_calls)
    ]
    last = AIMessageChunk(
        **said,
        tool_call_chunks=whole,
        usage_metadata=usage_metadata([answer]),
        response_metadata=response_metadata(answer),
        chunk_position="last",
    )
    yield ChatGenerationChunk(message=last)
