"""Which conversation a list of messages belongs to, and what of it the predictor reads.

Messages are those of chat completions: mappings with ``role`` and ``content``, a text or a list of parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import xxhash

from blendrag.forecast.window import Window

Messages = Sequence[Mapping[str, Any]]


def conversation_id(messages: Messages, given: str | None = None) -> str | None:
    """32 hex digits: of the id that the caller gave; else of the system prompt and the first user message.

    Those stay while a conversation grows. Conversations that open alike have one id: they share the KV of
    their opening, but one that goes on then speaks for those that do not; only an id tells them apart. None
    for a history without a user message.
    """
    if given:
        return xxhash.xxh3_128_hexdigest(b"given\0" + _bytes(given))
    opening = next(_texts(messages, "user"), None)
    if opening is None:
        return None
    system = "\0".join(_texts(messages, "system"))
    return xxhash.xxh3_128_hexdigest(b"\0\0".join((b"opening", _bytes(system), _bytes(opening))))


def window_of(messages: Messages) -> Window:
    """The user's prompts in a history; none make an empty window."""
    return Window.of(list(_texts(messages, "user")))


def without_documents(messages: Messages, documents: Iterable[str]) -> list[dict[str, Any]]:
    """The same messages without these texts, and with single blanks.

    What was retrieved is no word of the user's; and where it stands in the system prompt, that is another one
    at every turn.
    """
    longest_first = sorted({document for document in documents if document}, key=len, reverse=True)

    def said(text: str) -> str:
        for document in longest_first:
            text = text.replace(document, " ")
        return " ".join(text.split())

    return [
        {"role": message.get("role"), "content": said("\n".join(_parts(message["content"])))}
        for message in messages
        if message.get("content") is not None
    ]


def _texts(messages: Messages, role: str) -> Iterator[str]:
    for message in messages:
        if message.get("role") == role and message.get("content") is not None:
            yield "\n".join(_parts(message["content"]))


def _parts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, Sequence):
        parts = (part.get("text") for part in content if isinstance(part, Mapping))
        yield from (part for part in parts if isinstance(part, str))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
