"""Parts of messages as clients write them: kinds of other providers, and those that are documents."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from itertools import accumulate
from typing import Any

from blendrag.chat.foreign import text_of_url
from blendrag.chat.request import in_present_form
from blendrag.engine.worker.metrics import ROLES, count
from blendrag.server import Limits

MARK = "cache_control"
"""The field by which clients mark what comes again in other prompts."""

_DOCUMENTS = frozenset({"document", "search_result"})  # kinds of parts
# Kinds that no item of a history has: of messages and their parts, and of what only names another item.
_NO_ITEMS = frozenset(
    {"input_file", "input_text", "item_reference", "message", "output_text", "refusal", "text"}
)
_DEPTH = 4  # of parts within parts
# Where parts keep what is to be read: of tools' results, MCP's resources, and code that was run.
_WITHIN = ("content", "output", "outputs", "results", "resource", "logs", "code_execution_result")


def readable(
    message: Any, known: Collection[str], media: frozenset[str] = frozenset(), text_kind: str = "text"
) -> Any:
    """Return a message without parts of other kinds than those that vLLM knows: of these, their text.
    Histories come from other providers too, and one part would end every later turn of a conversation.

    media: keys that make a part of any kind one that is known. text_kind: that of parts with text.
    """
    if isinstance(message, dict) and "role" in message:
        message = in_present_form(message)
        if isinstance(calls := message.get("tool_calls"), list):
            message["tool_calls"] = list(map(_call, calls))
    if not isinstance(message, dict) or not isinstance(content := message.get("content"), list):
        return message
    kept = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "tool_result":
            result = in_present_form({"role": "tool", "content": part.get("content")})
            part = {**part, "content": result["content"]}
        if not isinstance(kind, str) or kind in known or not media.isdisjoint(part):
            kept.append(readable(part, known, media, text_kind))
        elif text := text_of(part):
            above = (part.get("title"), part.get("context"))
            told = "\n".join(one for one in (*above, text) if isinstance(one, str) and one)
            kept.append({"type": text_kind, "text": told})
    if left_out := len(content) - len(kept):
        role = message.get("role")
        count({"blendrag_parts_left_out": {role if role in ROLES else "other": left_out}})
    return {**message, "content": kept}


def _call(call: Any) -> Any:
    """Return a call with a kind, an id, and its arguments as text, without any of which vLLM refuses it. One
    of a custom tool, whose input is any text, is what vLLM makes of it in a response."""
    match call:
        case {"type": "custom", "custom": {"name": name, "input": given}}:
            call = {"id": call.get("id"), "function": {"name": name, "arguments": {"input": given}}}
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    known = {"id": call.get("id") or function.get("name"), "type": call.get("type") or "function"}
    return {**call, **known, "function": _with_arguments(function)}


def _with_arguments(function: dict[str, Any]) -> dict[str, Any]:
    given = function.get("arguments")
    written = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
    return {**function, "arguments": written}


def readable_item(
    item: Any, items: Collection[str], known: Collection[str], media: frozenset[str]
) -> Any | None:
    """Return an item of a Responses ``input`` with what vLLM makes something of; None if that is nothing.
    Mistakes of clients stay as they are, and so do media that it does not take: vLLM refuses them.

    items: kinds of items, beside messages, that it knows. known: kinds of parts, but for the model's own,
    whose messages are one text each. media: as for :func:`readable`.
    """
    kind, role = (item.get("type"), item.get("role")) if isinstance(item, dict) else (None, None)
    if isinstance(role, str) and kind in (None, "message"):
        item = {**item, "type": "message"}  # or vLLM reads it as anything
        if role != "assistant":
            return readable(_with_images(item), known, media, "input_text")
        item = readable(item, ())
        return _said(item, item["content"]) if isinstance(item.get("content"), list) else item
    if not isinstance(kind, str) or kind in _NO_ITEMS or kind in media:
        return item
    if kind not in items:
        if "role" in item and "content" in item:  # a message of an unknown kind
            return item
        item = readable({"role": "assistant", "content": [item]}, ())
        return _said({"role": "assistant", "type": "message"}, item["content"])
    item = {name: value for name, value in item.items() if name != "encrypted_content"}  # for its provider
    if "output" in item:
        tool = _with_images({"role": "tool", "content": item["output"]})
        result = readable(tool, known, text_kind="input_text")
        return {**item, "output": result["content"]}
    return _with_arguments(item) if kind == "function_call" else item


def _with_images(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with images of a chat completion as responses have them."""
    content = message.get("content")
    return {**message, "content": list(map(_image, content))} if isinstance(content, list) else message


def _image(part: Any) -> Any:
    match part:
        case {"type": "image_url", "image_url": {"url": str(url), **more}}:
            return {"type": "input_image", "image_url": url, "detail": more.get("detail") or "auto"}
        case {"type": "image_url", "image_url": str(url)}:
            return {"type": "input_image", "image_url": url, "detail": "auto"}
    return part


def _said(message: dict[str, Any], parts: list[Any]) -> dict[str, Any] | None:
    """Return a message of the model's own with one part, since vLLM reads the first; None without text."""
    text = text_of(parts)
    return {**message, "content": [{"type": "output_text", "text": text}]} if text else None


def text_of(part: Any, depth: int = _DEPTH) -> str:
    """Return the text of a part, or of the parts that are its content, as documents, search results and
    tools' results have them."""
    if isinstance(part, str):
        return part
    if not depth:
        return ""
    if isinstance(part, list):
        return "\n".join(filter(None, (text_of(one, depth - 1) for one in part)))
    if not isinstance(part, dict):
        return ""
    for name in ("text", "refusal"):
        if isinstance(text := part.get(name), str):
            return text
    if (text := text_of_url(part.get("file_data"))) is not None:
        return text
    file, document, source = part.get("file"), part.get("document"), part.get("source")
    within = next(
        (part[name] for name in _WITHIN if part.get(name)), file if isinstance(file, dict) else None
    )
    if "stdout" in part or "stderr" in part:
        within = [part.get("stdout"), part.get("stderr")]
    elif isinstance(source, dict) and source.get("type") == "base64":
        within = text_of_url(f"data:{source.get('media_type')};base64,{source.get('data')}")
    elif isinstance(source, dict):  # the data of others are bytes
        within = source.get("data" if source.get("type") == "text" else "content")
    elif isinstance(document, dict):
        within = document.get("text") or document.get("data") or document.get("content")
    return text_of(within, depth - 1)


def documents(body: dict[str, Any]) -> list[str]:
    """Return the texts in a body that its client has marked as what comes again, and those of parts that are
    documents by their kind."""
    found = [text_of(part) for name in ("system", "messages", "input") for part in _marked(body.get(name))]
    return list(dict.fromkeys(text for text in found if text.strip()))


def _marked(parts: Any, depth: int = _DEPTH) -> Iterator[dict[str, Any]]:
    for part in parts if isinstance(parts, list) else ():
        if not isinstance(part, dict):
            continue
        kind = part.get("type")
        if isinstance(part.get(MARK), dict) or (isinstance(kind, str) and kind in _DOCUMENTS):
            yield part
        elif depth:
            yield from _marked(part.get("content") or part.get("output"), depth - 1)


def within(texts: list[str], limits: Limits) -> list[str]:
    """Return the first of the texts, so many as a request may name."""
    lengths = accumulate(map(len, texts))
    most = limits.text_mib << 20
    return [text for text, length in zip(texts, lengths, strict=True) if length <= most][: limits.items]
