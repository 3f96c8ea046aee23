"""The questions' documents as chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blendrag.lab.evaluate.formats import Format, Question
from blendrag.lab.scratch import ScratchStore
from blendrag.prompt import encode_document
from blendrag.store.contexts import Chunk, Ids

Documents = tuple[tuple[Ids, ...], ...]  # per document its chunks


def cut(tokenizer: Any, question: Question, format: Format, chunk_tokens: int) -> Documents:
    """Return every document's token ids in chunks, the last of them shorter. The user's own documents are cut
    into ``chunk_tokens`` tokens, as an index would cut them, those of public sets as the format says."""
    tokens = chunk_tokens if format.name == "jsonl" else format.cut
    whole = (encode_document(tokenizer, text) for text in question.documents)
    return tuple(
        tuple(ids[at : at + (tokens or len(ids))] for at in range(0, len(ids), tokens or len(ids)))
        for ids in whole
        if ids
    )


def unstored(documents: Documents) -> list[list[Chunk]]:
    """Return the documents' chunks for prompts of which nothing is stored."""
    return [[Chunk("", "", ids) for ids in each] for each in documents]


def before(tokenizer: Any, question: Question) -> tuple[Ids, ...]:
    """Return the token ids before each of the question's documents."""
    return tuple(encode_document(tokenizer, text) for text in question.before)


def stored(store: ScratchStore, documents: Documents, before: Sequence[Ids] = ()) -> list[list[Chunk]]:
    """Return the documents' chunks as they are, or will be, stored."""
    known = before or [()] * len(documents)
    return [store.document(each, ids) for each, ids in zip(documents, known, strict=True)]
