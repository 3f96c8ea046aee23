"""The text of a message's content, whichever provider's blocks it is made of."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from blendrag import foreign
from blendrag.errors import ConfigError

CALLS = {"functionCall", "function_call", "toolUse", "tool_call", "tool_call_chunk", "tool_use"}
"""Types of blocks that are calls, which the message itself lists."""
# Types of blocks without text here: calls; broken ones, and thinking, which are read apart; marks of a cache.
_ELSEWHERE = CALLS | {
    "cachePoint", "cache_point", "invalid_tool_call", "reasoning", "reasoningContent", "reasoning_content",
    "redacted_thinking", "thinking",
}  # fmt: skip
# Keys under which blocks keep what is to be read: as a string, or in blocks of their own.
_WITHIN = (
    "text", "refusal", "transcript", "content", "source", "data", "document", "output", "value",
    "citationsContent", "code_execution_result", "file", "functionResponse", "guardContent", "logs",
    "outputs", "parts", "resource", "response", "result", "results", "searchResult", "stdout", "toolResult",
)  # fmt: skip
_DATA = ("json", "response", "output", "data")  # keys of what a tool gave, if that is no text
_MEDIA = re.compile(r"image|audio|video|file|media|document|inline_?data|text-plain", re.IGNORECASE)


def kind_of(block: Any) -> str:
    """Return the type of a block; of one without, as Bedrock and Gemini have them, its first key."""
    if not isinstance(block, Mapping):
        return type(block).__name__
    return str(block.get("type") or next(iter(block), ""))


def is_media(kind: str) -> bool:
    """Return whether a block without text is a picture, a recording or a file."""
    return _MEDIA.search(kind) is not None


def text_of(content: Any, left_out: Counter[str], *, streamed: bool = False) -> str:
    """Return the text of a content: of blocks, each on a line of its own, and documents apart.

    left_out: counts blocks that have none, by their kinds. streamed: blocks are pieces of one text, as models
    give them, and follow each other as they are. Raises ConfigError for what is nested too deeply.
    """
    try:
        return _read(content, left_out, streamed) or ""
    except RecursionError:
        raise ConfigError("a message is nested too deeply") from None


def _read(value: Any, left_out: Counter[str], streamed: bool) -> str | None:
    """Return what there is to read in a content, a block, or a part of one; None if nothing."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return _joined(value, left_out, streamed)
    if not isinstance(value, Mapping):
        return None
    if "base64" in (value.get("type"), value.get("source_type")):
        return _decoded(value)
    held = any(isinstance(value.get(name), str) for name in ("base64", "file_data"))
    if (held or value.get("type") == "media") and (text := _decoded(value)) is not None:
        return text
    is_image = kind_of(value).startswith("image")
    empty: str | None = None
    for name in _WITHIN:
        within = value.get(name)
        if (
            isinstance(within, str)
            and (is_image or name in ("data", "file", "source"))
            and not _is_text(value)
        ):
            continue  # an address, or bytes
        if within is None or (text := _read(within, left_out, streamed)) is None:
            continue
        empty = ""
        is_document = name != "text" or value.get("type") == "text-plain"
        above = [value.get(about) for about in ("title", "context")] if is_document else []
        below = [value.get("stderr")] if name == "stdout" else []
        if read := "\n".join(part for part in (*above, text, *below) if isinstance(part, str) and part):
            return read
    for name in _DATA:
        if isinstance(value.get(name), Mapping | list):
            return json.dumps(value[name], ensure_ascii=False, default=str)
    return empty


def _joined(blocks: Iterable[Any], left_out: Counter[str], streamed: bool) -> str | None:
    text, apart, missed = "", False, Counter[str]()
    for block in blocks:
        if kind_of(block) in _ELSEWHERE or (isinstance(block, Mapping) and block.get("thought") is True):
            apart = apart or (streamed and kind_of(block) in CALLS)
            continue
        found = _read(block, missed, streamed)
        if found is None:
            missed[kind_of(block)] += 1
        elif found:
            separate = isinstance(block, Mapping) and not isinstance(block.get("text"), str)
            together = streamed or text[-1:].isspace() or found[:1].isspace()
            gap = "\n\n" if apart or separate else "" if together else "\n"
            text += (gap if text else "") + found
            apart = separate
    left_out += missed
    return text or None


def _decoded(block: Mapping[str, Any]) -> str | None:
    """Return the text of a file that is one, if a block holds its bytes."""
    data, kind = block.get("base64") or block.get("data"), block.get("mime_type") or block.get("media_type")
    if kind == "application/pdf" and not str(data).startswith("JVBERi"):  # so to LangChain is OpenAI's file
        kind = "text/plain"
    return foreign.text_of_url(block.get("file_data") or f"data:{kind};base64,{data}")


def _is_text(block: Mapping[str, Any]) -> bool:
    """Return whether the data of a block are text."""
    said = block.get("type"), block.get("media_type"), block.get("mime_type"), block.get("source_type")
    return any(str(one).startswith("text") for one in said if one)
