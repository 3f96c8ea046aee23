"""From a question, or a prompt of the user's own, to a plan and its recipe."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blendrag.engine.recipe import Recipe, spans_of
from blendrag.errors import EmptyIndexError, PromptTooLongError
from blendrag.index.session import EngineSession
from blendrag.index.vectors import Hit, VectorStore
from blendrag.prompt import DocumentNote, KnownText, PromptPlan, Recogniser, assemble, plan_chat
from blendrag.settings import Settings
from blendrag.store.catalogue import Catalogue

Messages = Sequence[Mapping[str, Any]]

# The window must leave room for an answer worth reading.
_LEAST_ANSWER_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Prompt:
    """A planned prompt. hits: the chunks that were retrieved for it, best first; none for a user's own."""

    plan: PromptPlan
    hits: tuple[Hit, ...] = ()


class Prompter:
    """Plans prompts over one index. Thread-safe."""

    def __init__(
        self,
        settings: Settings,
        tokenizer: Any,
        vectors: VectorStore,
        catalogue: Catalogue,
        session: EngineSession,
    ) -> None:
        self._settings, self._tokenizer, self._session = settings, tokenizer, session
        self._vectors, self._catalogue = vectors, catalogue
        self._recogniser: Recogniser | None = None
        self._lock = threading.Lock()

    def retrieve(self, question: str, top_k: int | None = None) -> list[Hit]:
        """The chunks most like the question, best first. Raises EmptyIndexError without any documents."""
        hits = self._vectors.search(question, top_k or self._settings.top_k)
        if not hits:
            raise EmptyIndexError("the index holds no documents: ingest some first")
        return hits

    def from_question(self, question: str, top_k: int | None, history: Messages) -> Prompt:
        """System prompt, retrieved documents, question. Documents that do not fit the window are left out."""
        hits = self.retrieve(question, top_k)
        entries = {entry.key: entry for entry in self._catalogue.entries_of(hit.key for hit in hits)}
        window = self._session.start().max_model_len
        left_out: list[DocumentNote] = []
        while hits:
            known = [
                KnownText(entries[hit.key].text, entries[hit.key].token_ids, hit.key, hit.source)
                for hit in hits
                if hit.key in entries
            ]
            plan = assemble(
                self._tokenizer,
                system_prompt=self._settings.system_prompt,
                documents=known,
                separator=self._settings.separator,
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
        plan = plan_chat([dict(m) for m in messages], self._tokenizer, self._known_texts(), hints=hints)
        return Prompt(plan)

    def explain(self, plan: PromptPlan) -> list[dict[str, Any]]:
        """A row per segment, and per document that is not in the prompt: found or not, why, tokens reused."""
        ready = self._catalogue.ready(plan.cached_keys)
        rows = plan.describe()
        for row in rows:
            if row["kind"] == "cached" and row["chunk_key"] not in ready:
                row.update(kind="fresh", reused=0, reason="its KV is not stored (any more): ingest again")
        return rows

    def recipe(self, plan: PromptPlan, blend: bool | None = None) -> tuple[Recipe | None, str | None]:
        """How a plan is blended; or None, and why it is not."""
        s, engine = self._settings, self._session.start()
        if not (s.blend if blend is None else blend):
            return None, "blending is switched off"
        if not engine.blends:
            return None, f"this model is not blended: {engine.facts['reason']}"
        ready = self._catalogue.ready(plan.cached_keys)
        spans = spans_of([span for span in plan.transfer_params() if span[0] in ready])
        cached = sum(length for _, _, length in spans)
        if not spans or cached < s.min_cached_tokens:
            return None, f"only {cached} cached tokens, fewer than min_cached_tokens = {s.min_cached_tokens}"
        store = self._session.store_id
        return Recipe(
            store, spans, s.selector, s.recompute_ratio, s.metric, s.check_layers, s.threshold
        ), None

    def repair(self, missing: Iterable[str]) -> None:
        """Prefill chunks again whose KV was found missing or damaged, while the user reads the answer."""
        entries = [entry for entry in self._catalogue.entries_of(missing) if entry.state == "pending"]
        if entries:
            self._session.call_later("ingest", [[entry.key, list(entry.token_ids)] for entry in entries])
            self._session.call_later("flush")

    def documents_changed(self) -> None:
        """Look the texts up again before the next prompt of the user's own."""
        with self._lock:
            self._recogniser = None

    def _known_texts(self) -> Recogniser:
        with self._lock:
            if self._recogniser is None:
                self._recogniser = Recogniser(self._tokenizer)
                sources = {key: owner for owner, keys in self._catalogue.owners().items() for key in keys}
                for entry in self._catalogue.entries():
                    self._recogniser.add(entry.key, entry.text, entry.token_ids, sources.get(entry.key))
            return self._recogniser
