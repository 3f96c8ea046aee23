"""Chunks with ids, and a report, for ``ingest`` of a vector store."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document

from blendrag import PrefillReport, Progress, plain

if TYPE_CHECKING:
    from langchain_text_splitters import TextSplitter

    from blendrag import ChatModel


@dataclass(slots=True, kw_only=True)
class ChunkIngestReport(PrefillReport):
    """A report of one ``ingest``: chunks stored, chunks that were stored before, and what was prefilled."""

    added: int = 0
    skipped: int = 0


class Notes(Progress):
    """Notes on what the engine is doing with a batch, beside a bar that counts chunks."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar

    def note(self, what: str) -> None:
        self._bar.note(f"ingest: {what}")


def encodable(item: Any) -> Any:
    """Return an item to be added with a text that any embedding takes."""
    if isinstance(item, str):
        return plain(item)
    if isinstance(item, Document) and item.page_content != (text := plain(item.page_content)):
        return item.model_copy(update={"page_content": text})
    return (plain(item[0]), *item[1:]) if isinstance(item, tuple) else item


def identified(chunks: Iterable[Document]) -> list[tuple[str, Document]]:
    """Return chunks with ids by source and text; the same text again in one source has an id of its own."""
    seen, found = Counter[tuple[str, str]](), list[tuple[str, Document]]()
    for chunk in map(encodable, chunks):
        named = str(chunk.metadata.get("source", "")), chunk.page_content
        content = json.dumps([*named, seen[named]]).encode()
        seen[named] += 1
        found.append((hashlib.sha256(content).hexdigest()[:32], chunk))
    return found


def token_splitter(chat: ChatModel) -> TextSplitter:
    """Return a splitter into chunks of as many tokens as blendrag's own have."""
    from langchain_text_splitters import RecursiveCharacterTextSplitter, TextSplitter

    from blendrag import RemoteChat

    if isinstance(chat, RemoteChat):  # the one below measures every paragraph, each with a request
        split = chat.split

        class ByServer(TextSplitter):
            def split_text(self, text: str) -> list[str]:
                return split(text)

        return ByServer()
    return RecursiveCharacterTextSplitter(
        chunk_size=chat.settings.chunk_tokens,
        chunk_overlap=chat.settings.chunk_overlap,
        length_function=lambda text: len(chat.token_ids(text)),
    )
