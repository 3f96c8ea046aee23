"""Conversion between LlamaIndex's messages and blendrag's plain data."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    CitableBlock,
    CitationBlock,
    CompletionResponse,
    DocumentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import BaseModel

from blendrag import foreign

if TYPE_CHECKING:
    from blendrag import Answer

_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}
_IDS = ("tool_call_id", "call_id", "tool_use_id", "toolUseId", "tool_id", "id")  # the results' come first
_ARGUMENTS = ("arguments", "args", "input", "parameters", "tool_kwargs")


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return role, parts, tool calls and thinking of each message. A part has its kind, and its text if it
    has one; else it may have the reason."""
    plain = list[dict[str, Any]]()
    called: dict[str, str] = {}  # names of functions by call: their results have the id only
    for message in messages:
        role = _ROLES.get(message.role, message.role.value)
        parts = [part for block in message.blocks for part in _read(block)]
        one: dict[str, Any] = {"role": role, "content": parts}
        if (
            role == "assistant"
            and not message.content
            and (refusal := message.additional_kwargs.get("refusal"))
        ):
            one["content"] = [{"type": "refusal", "text": refusal}]
        if calls := _calls_of(message):
            one["tool_calls"] = calls
            called |= {call["id"]: call["name"] for call in calls}
        if role == "assistant" and (thought := _thinking_of(message)):
            one["reasoning_content"] = thought
        if role == "tool":
            one["tool_call_id"] = id = _id_in(message.additional_kwargs, _IDS[:-1])  # the last is its own
            if name := message.additional_kwargs.get("name") or called.get(id):
                one["name"] = name
        plain.append(one)
    return plain


def assistant_message(answer: Answer, unknown: bool) -> ChatMessage:
    """Return the model's answer. Calls are blocks; and, for code that looks there, in ``additional_kwargs``
    as OpenAI writes them. unknown: also those of tools that there are not."""
    calls = answer.named_calls if unknown else answer.tool_calls
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
    """Return the blocks of what the model thought, if anything, and of what it says."""
    blocks: list[Any] = [ThinkingBlock(content=reasoning)] if reasoning else []
    return blocks if text is None else [*blocks, TextBlock(text=text)]


def as_completion(response: ChatResponse) -> CompletionResponse:
    """Return a chat's response as a completion's."""
    return CompletionResponse(
        text=response.message.content or "",
        delta=response.delta,
        raw=response.raw,
        logprobs=response.logprobs,
        additional_kwargs=response.additional_kwargs,
    )


def _read(block: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a block, in order."""
    match block:
        case TextBlock():
            yield {"type": block.block_type, "text": block.text}
        case CitableBlock():
            if block.title:
                yield {"type": "text", "text": block.title}
            for inner in block.content:
                yield from _read(inner)
        case CitationBlock():
            yield from _read(block.cited_content)
        case DocumentBlock():
            yield {"type": block.block_type, **_document(block)}
        case ThinkingBlock() | CachePoint() | ToolCallBlock():  # kept elsewhere, or nothing to keep
            return
        case _:
            yield {"type": block.block_type}


def _document(block: DocumentBlock) -> dict[str, str]:
    """Return the text of a file that is one, or why it has none; nothing is fetched for it."""
    kind = block.document_mimetype or "text/"  # LlamaIndex guesses only others
    if (block.url and not block.data) or not foreign.is_text(kind):
        return {}
    try:
        data = cast(bytes, block.resolve_document().read())
        wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        return {"text": data.decode("utf-16" if wide else "utf-8-sig")}
    except UnicodeDecodeError:
        return {"reason": "its text is not in UTF-8: convert it, or give the text itself"}
    except (OSError, ValueError) as error:
        return {"reason": f"it cannot be read: {error}"}


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
    more = message.additional_kwargs  # of another model's class
    written = [*(more.get("tool_calls") or ()), *filter(None, [more.get("function_call")])]
    return [call for one in written if (call := _foreign_call(one))["name"]]


def _foreign_call(written: Any) -> dict[str, Any]:
    """Return a call as other providers' classes keep it: OpenAI's dictionaries and objects, old and new, and
    those that have name and arguments side by side."""
    call = _fields(written)
    function = _fields(call.get("function") or call.get("custom") or written)
    arguments: Any = next((function[name] for name in _ARGUMENTS if function.get(name)), {})
    name = function.get("name") or function.get("tool_name")
    return _call(_id_in(call), str(name or ""), arguments)


def _id_in(fields: Mapping[str, Any], names: Sequence[str] = _IDS) -> str:
    return str(next((fields[name] for name in names if fields.get(name)), ""))


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping | BaseModel):
        return dict(value)
    return dict(getattr(value, "__dict__", {}))


def _call(id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    """Return a call as requests take it, which read arguments that are text."""
    written = isinstance(arguments, str)
    return {"id": id or "", "name": name, "arguments": arguments if written else _fields(arguments)}
