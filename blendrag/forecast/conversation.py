"""Conversations as the predictor knows them: an id, and the latest prompts, cut to a budget of tokens.

LPC section 3.2: the prompt and the four before it, without answers; 512 tokens, divided equally; of a longer
prompt half from its head and half from its tail, where what matters usually stands. Messages are those of
chat completions: mappings with ``role`` and ``content``, a text or a list of parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from blendrag.prompt import Messages
from blendrag.text import encodable

PROMPTS = 5
TOKENS = 512
# Characters read per token that may stay: more than words have, so that a cut never shows, and little of a
# megabyte.
_CHARACTERS = 32
# Characters kept of a prompt, more than are read: windows wait in queues, and some prompts are books.
_KEPT = (TOKENS + 2) * _CHARACTERS


@dataclass(frozen=True, slots=True)
class Window:
    """A conversation at one of its prompts.

    prompts: the latest, oldest first, at most ``PROMPTS``; of long ones both ends, which is all that is read
    of them. turns: prompts in the whole conversation.
    """

    prompts: tuple[str, ...]
    turns: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompts", tuple(map(_ends, self.prompts)))

    @classmethod
    def of(cls, prompts: Sequence[str]) -> Window:
        """Make a window of all prompts so far, oldest first; none make an empty window."""
        return cls(tuple(prompts[-PROMPTS:]), len(prompts))


def _ends(text: str) -> str:
    if len(text) <= _KEPT:
        return text
    text = text.strip()
    return text if len(text) <= _KEPT else text[: _KEPT // 2] + text[-_KEPT // 2 :]


def conversation_id(messages: Messages, given: str | None = None, namespace: str = "") -> str | None:
    """Return 32 hex digits made from the id that the caller gave, or else from the system prompt and the
    first user message. Each namespace has its own.

    They stay the same while a conversation grows. Conversations that open alike have one id: they share the
    KV of their opening, but one that goes on then speaks for those that do not; only an id tells them apart.
    None for a history without a user message.
    """
    whose = b"%s\0\0\0" % namespace.encode() if namespace else b""
    if given:
        return xxhash.xxh3_128_hexdigest(whose + b"given\0" + _bytes(given))
    opening = next(_texts(messages, "user"), None)
    if opening is None:
        return None
    system = "\0".join(_texts(messages, "system"))
    return xxhash.xxh3_128_hexdigest(whose + b"\0\0".join((b"opening", _bytes(system), _bytes(opening))))


def window_of(messages: Messages) -> Window:
    """Return the user's prompts in a history; none make an empty window."""
    return Window.of(list(_texts(messages, "user")))


def without_documents(messages: Messages, documents: Iterable[str]) -> list[dict[str, Any]]:
    """Return the same messages without these texts, and with single blanks.

    What was retrieved is not the user's word; and where it stands in the system prompt, that prompt changes
    at every turn.
    """
    longest_first = sorted({document for document in documents if document}, key=len, reverse=True)

    def cleaned(text: str) -> str:
        for document in longest_first:
            text = text.replace(document, " ")
        return " ".join(text.split())

    return [
        {"role": message.get("role"), "content": cleaned("\n".join(_parts(message["content"])))}
        for message in messages
        if message.get("content") is not None
    ]


def shortened(text: str, tokenizer: Any, tokens: int) -> str:
    """Return ``text`` within about ``tokens`` tokens, of a longer one its head and tail."""
    text = encodable(text.strip())
    if len(text) <= tokens:  # a token is at least a character
        return text
    half = tokens // 2
    reach = half * _CHARACTERS
    short = len(text) <= 2 * reach
    head, tail = (text, text) if short else (text[:reach], text[-reach:])
    first = _spans(head, tokenizer)
    if short and len(first) <= tokens:
        return text
    last = first if short else _spans(tail, tokenizer)
    kept = head[: first[:half][-1][1]] if first else "", tail[last[-half:][0][0] :] if last else ""
    return " … ".join(kept)


def _spans(text: str, tokenizer: Any) -> list[tuple[int, int]]:
    """Return where each token begins and ends in ``text``."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return encoded["offset_mapping"]


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
