"""Retrieval for a question: the chunks most like it, and the prompt that they and the question make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from blendrag.chat.request import Source
from blendrag.errors import EmptyIndexError, PromptTooLongError
from blendrag.index.answering import LEAST_ANSWER_TOKENS
from blendrag.index.vectors import Hit, VectorStore
from blendrag.prompt import DocumentNote, KnownText, Messages, PromptPlan, assemble
from blendrag.serving.library import Library
from blendrag.text import encodable, plain


class Retriever:
    """A retriever that also plans the prompt. Thread-safe."""

    def __init__(self, library: Library, vectors: VectorStore) -> None:
        self._library, self._vectors = library, vectors

    def search(self, question: str, similarity_top_k: int | None = None) -> list[Hit]:
        """Return the chunks most like the question, best first. Raises EmptyIndexError without any
        documents."""
        hits = self._vectors.search(question, similarity_top_k or self._library.settings.similarity_top_k)
        if not hits:
            raise EmptyIndexError("the index holds no documents: ingest some first")
        return hits

    def plan(
        self,
        question: str,
        similarity_top_k: int | None,
        history: Messages,
        chat_template_kwargs: Mapping[str, Any],
    ) -> tuple[PromptPlan, tuple[Source, ...]]:
        """Plan a prompt of system prompt, retrieved documents and question. Returns what was retrieved, too,
        best first. Documents that do not fit the window are left out."""
        library, settings = self._library, self._library.settings
        hits = self.search(question, similarity_top_k)
        entries = {entry.key: entry for entry in library.catalogue.entries_of(hit.key for hit in hits)}
        window = library.start().max_model_len
        left_out: list[DocumentNote] = []
        while hits:
            known = [
                KnownText(entries[hit.key].text, entries[hit.key].token_ids, hit.key, hit.source)
                for hit in hits
                if hit.key in entries
            ]
            known = [known[place] for place in library.order([text.key or "" for text in known])]
            plan = assemble(
                library.tokenizer,
                system_prompt=settings.system_prompt,
                documents=known,
                separator=settings.separator,
                question=encodable(question),
                history=plain(history),
                template_options=chat_template_kwargs,
            )
            if len(plan.token_ids) + LEAST_ANSWER_TOKENS <= window:
                sources = tuple(Source(hit.source, hit.ordinal, hit.score, hit.text) for hit in hits)
                return replace(plan, notes=(*plan.notes, *left_out)), sources
            last = hits.pop()
            tokens = len(entries[last.key].token_ids) if last.key in entries else 0
            left_out.append(DocumentNote(last.source, False, "no room in the model's window", tokens, 0))
        raise PromptTooLongError(
            f"the question leaves no room for a document in the model's window of {window} tokens"
        )
