"""From a question, or a prompt of the user's own, to a plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from blendrag.errors import EmptyIndexError, PromptTooLongError
from blendrag.index.vectors import Hit, VectorStore
from blendrag.prompt import DocumentNote, KnownText, PromptPlan, assemble
from blendrag.serving.library import Library, Messages

# The window must leave room for an answer worth reading.
_LEAST_ANSWER_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Prompt:
    """A planned prompt. hits: the chunks that were retrieved for it, best first; none for a user's own."""

    plan: PromptPlan
    hits: tuple[Hit, ...] = ()


class Prompter:
    """Plans prompts over one index. Thread-safe."""

    def __init__(self, library: Library, vectors: VectorStore) -> None:
        self.library, self._vectors = library, vectors

    def retrieve(self, question: str, top_k: int | None = None) -> list[Hit]:
        """The chunks most like the question, best first. Raises EmptyIndexError without any documents."""
        hits = self._vectors.search(question, top_k or self.library.settings.top_k)
        if not hits:
            raise EmptyIndexError("the index holds no documents: ingest some first")
        return hits

    def from_question(self, question: str, top_k: int | None, history: Messages) -> Prompt:
        """System prompt, retrieved documents, question. Documents that do not fit the window are left out."""
        hits = self.retrieve(question, top_k)
        entries = {entry.key: entry for entry in self.library.catalogue.entries_of(hit.key for hit in hits)}
        window = self.library.start().max_model_len
        left_out: list[DocumentNote] = []
        while hits:
            known = [
                KnownText(entries[hit.key].text, entries[hit.key].token_ids, hit.key, hit.source)
                for hit in hits
                if hit.key in entries
            ]
            plan = assemble(
                self.library.tokenizer,
                system_prompt=self.library.settings.system_prompt,
                documents=known,
                separator=self.library.settings.separator,
                question=question,
                history=[dict(message) for message in history],
            )
            if len(plan.token_ids) + _LEAST_ANSWER_TOKENS <= window:
                return Prompt(replace(plan, notes=(*plan.notes, *left_out)), tuple(hits))
            last = hits.pop()
            tokens = len(entries[last.key].token_ids) if last.key in entries else 0
            left_out.append(DocumentNote(last.source, False, "no room in the model's window", tokens, 0))
        raise PromptTooLongError(
            f"the question leaves no room for a document in the model's window of {window} tokens"
        )

    def from_messages(self, messages: Messages, hints: Iterable[str] = ()) -> Prompt:
        """A prompt of the user's own: ingested texts are recognised in it by content."""
        return Prompt(self.library.plan(messages, hints))
