"""The texts of a library, each with the documents that own it: registered, prefilled, repaired, deleted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from blendrag.errors import EngineClosedError
from blendrag.files.lock import Turns
from blendrag.progress import Progress
from blendrag.prompt import Form, encode_document, shared_prefix
from blendrag.serving.owners import repeat_of, with_repeats
from blendrag.serving.prefill import PrefillReport, batches, prefill_pending
from blendrag.serving.session import EngineSession
from blendrag.serving.sidecars import Sidecars
from blendrag.store.catalogue import Catalogue
from blendrag.store.contexts import Chunk, Contexts

_MOST_FORMS = 4  # of a text


@dataclass(slots=True)
class _Document:
    """A source whose texts are registered. made: keys by text. last: chunks of the last owner."""

    made: dict[str, str] = field(default_factory=dict)
    last: list[Chunk] = field(default_factory=list)


class Texts:
    """The texts of a library. Thread-safe.

    A text belongs to owners (documents). It is kept as long as it has one, and once however many it has.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        contexts: Contexts,
        tokenizer: Any,
        session: EngineSession,
        sidecars: Sidecars,
        shared: Path | None,
    ) -> None:
        """Begin for a library. shared: its folder, if other processes use it, too."""
        self.catalogue, self.contexts, self._tokenizer = catalogue, contexts, tokenizer
        self.session, self._sidecars = session, sidecars
        self._prefilling = Turns(shared and shared / "lock.prefilling")
        self.changing = Turns(shared and shared / "lock.changing")
        """The turn at changing the catalogue: while one is held, nobody's change comes in between."""
        self._no_ingest = False
        self._under_way = set[tuple[str, str]]()  # states and keys of what is repaired

    def stop_ingest(self) -> None:
        """Have :meth:`prefill` end behind the texts at hand, now and later. Returns at once."""
        self._no_ingest = True

    def _check_ingest(self) -> None:
        if self._no_ingest:
            raise EngineClosedError("the engine is about to end: texts without KV are prefilled by the next")

    def register(
        self, documents: Mapping[str, Iterable[str]], sources: Mapping[str, str] | None = None
    ) -> set[str]:
        """Make these the texts of their owners, in place of those they had. :meth:`prefill` does the rest.
        Returns the owners that had others, or none; the others keep their chunks as they are.

        sources: the document that an owner's texts are a part of. New texts of a source are prefilled behind
        those of the owner that precedes theirs here. Several texts of an owner are forms of one (with
        metadata and without): each stands behind the same form. Blanks around a text are not part of it:
        prompts often strip them.
        """
        sources = sources or {}
        wanted = {
            owner: [text for text in dict.fromkeys(text.strip() for text in texts) if text]
            for owner, texts in documents.items()
        }
        new, repeats = set[str](), set[str]()
        with self.changing.mine():
            for owner, texts in wanted.items():
                if (had := self.catalogue.texts_of(owner)) != set(texts):
                    new.add(owner)
                    repeats |= {repeat_of(text) for text in had.difference(texts)}
            orphans = self._take(self._without(new))
            so_far: dict[str, _Document] = {}  # by source
            for owner, texts in wanted.items():
                source = sources.get(owner)
                document = so_far.setdefault(source, _Document()) if source else _Document()
                held = [] if owner in new else self.catalogue.chunks_of(owner)
                orphans += self._take({owner: self._chunks(texts, document, held)})
            if repeats := self.catalogue.owned(repeats):
                self.release(repeats)
        self.drop(orphans)
        return new

    def release(self, owners: Iterable[str]) -> None:
        """Forget owners, and the KV of the texts that nobody else owns. An unknown owner is no error.

        What was prefilled behind these texts is prefilled anew: beside prompts, if the engine runs.
        """
        with self.changing.mine():
            leaving = with_repeats(self.catalogue, owners)
            moved = self._without(leaving)
            orphans = self._take(moved)
            orphans += self.catalogue.release(*leaving)
        self.drop(orphans)
        self.repair(chunk.key for chunks in moved.values() for chunk in chunks)

    def _chunks(self, texts: Iterable[str], document: _Document, held: Iterable[Chunk]) -> list[Chunk]:
        """Return a document's next chunks. held: those that stay; a text that returns is one of these."""
        before, chunks = document.last, list[Chunk]()
        known = {chunk.text: chunk for chunk in held}
        for text in texts:
            if text not in known and text in document.made:
                known[text] = self.catalogue.entries_of([document.made[text]])[0]
            elif text not in known:
                if not (ids := encode_document(self._tokenizer, text)):
                    continue
                same_form = before[min(len(chunks), len(before) - 1)] if before else None
                known[text] = self.contexts.chunk(text, ids, same_form)
            chunks.append(known[text])
        document.made |= {chunk.text: chunk.key for chunk in chunks}
        document.last = chunks or before
        return chunks

    def _without(self, owners: Iterable[str]) -> dict[str, list[Chunk]]:
        """Return the chunks of other owners whose KV has traces of what only these own, as they are to be
        when these have left."""
        leaving = set(owners)
        going = set(self.catalogue.only_of(*leaving))
        renewed: dict[str, Chunk] = {}
        for entry in self.catalogue.behind(going):
            if entry.key not in going:
                before = renewed.get(entry.after)
                renewed[entry.key] = self.contexts.chunk(entry.text, entry.token_ids, before)
        return {
            owner: [renewed.get(chunk.key, chunk) for chunk in self.catalogue.chunks_of(owner)]
            for owner in self.catalogue.owners_of(renewed)
            if owner not in leaving
        }

    def _take(self, owned: Mapping[str, Sequence[Chunk]]) -> list[str]:
        """Register chunks by owner. Returns keys whose KV can go."""
        orphans: list[str] = []
        for owner, chunks in owned.items():
            orphans += self.catalogue.register(owner, chunks)
        return orphans

    def learn(self, forms: Iterable[Form]) -> None:
        """Keep texts in the forms in which a prompt has held them, too: prefilled beside prompts, behind what
        the texts are prefilled behind. A text that has left meanwhile leaves its forms."""
        learnt = []
        with self.changing.mine():
            for form in forms:
                bases = self.catalogue.entries_of([form.key])
                before = self.catalogue.entries_of([base.after for base in bases if base.after])
                ids = encode_document(self._tokenizer, form.text)
                if bases and ids:
                    chunk = self.contexts.chunk(form.text, ids, before[0] if before else None)
                    if self.catalogue.add_form(form.key, chunk, _MOST_FORMS):
                        learnt.append(chunk.key)
        if learnt:
            self.repair(learnt)

    def drop(self, keys: Iterable[str]) -> None:
        """Delete the KV of chunks that have left the catalogue."""
        with self.changing.mine():
            keys = set(keys)
            keys = sorted(keys - self.catalogue.known(keys))  # what one owner dropped, another may have taken
            if not keys:
                return
            if store := self.session.store:  # else swept when the store is next opened
                store.delete(keys)
            self._sidecars.forget(keys)

    def prefill(self, report: PrefillReport, progress: Progress, whose: str = "") -> None:
        """Compute and store the KV of all texts that have none. Raises StoreFullError, EngineError.

        whose: what the names of owners begin with; of texts that are too long, theirs are counted.
        """
        with self._prefilling.mine():  # a second caller waits, and finds nothing left to do
            self._check_ingest()
            self.session.settle()  # nor is done again what is repaired beside prompts
            pending = self.catalogue.pending()
            if not pending:
                return
            engine = self._sidecars.start(progress)
            report.not_blended = engine.facts.reason
            store = self.session.open(progress)
            prefixes = None if store else self._sidecars.prefixes
            if store is None and prefixes is None:
                return
            before, window = self.session.prefix, engine.max_model_len
            if store is None:  # what a prompt of blendrag's own has before its first document
                settings = self.session.settings
                before = list(shared_prefix(self._tokenizer, settings.system_prompt, settings.separator))
            fitting = [one for one in pending if len(before) + len(one.context) + len(one.token_ids) < window]
            for key in {one.key for one in pending} - {one.key for one in fitting}:
                report.too_long += any(owner.startswith(whose) for owner in self.catalogue.owners_of([key]))
            if prefixes is not None:
                room = max(spec.bytes or 0 for spec in self.session.settings.tree)
                prefixes.grow_first(fitting, before, room, report, progress, self._check_ingest)
            elif store is not None and fitting:
                prefill_pending(fitting, store, report, progress, self._check_ingest)

    def repair(self, missing: Iterable[str]) -> int:
        """Prefill chunks again whose KV was found missing or damaged, or has to be another, beside prompts.

        Returns their tokens, without those of chunks that still have to be looked for.
        """
        found, store = self.catalogue.entries_of(list(missing)), self.session.store
        for state, begin in (("pending", store.ingest_later), ("ready", store.check_later)) if store else ():
            new = [one for one in found if one.state == state and (state, one.key) not in self._under_way]
            for batch in batches(new):
                work, names = begin(batch), {(state, one.key) for one in batch}
                self._under_way |= names  # prompts that are answered at once miss the same chunks
                work.add_done_callback(partial(self._ended, names))
                self.session.later(work)
        return sum(len(one.token_ids) for one in found if one.state == "pending")

    def _ended(self, names: set[tuple[str, str]], _: Future[Any]) -> None:
        self._under_way -= names
