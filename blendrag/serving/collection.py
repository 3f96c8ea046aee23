"""The documents of one vector store: whose KV is kept, and as owners of texts in a library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blendrag.progress import Progress, progress_bar
from blendrag.serving.owners import owner_of, volatile
from blendrag.serving.prefill import PrefillReport
from blendrag.text import encodable

if TYPE_CHECKING:  # it imports torch, and vector stores are imported before that is needed
    from blendrag.serving.library import Library

NO_COLLECTION = "no_collection"
"""The type of a server's error where a collection has no documents; other things are not found either."""

Texts = Mapping[str, Iterable[str]]
Sources = Mapping[str, str]


@dataclass(slots=True, kw_only=True)
class SyncReport(PrefillReport):
    """A report of what a sync with a vector store added, removed, changed and left, in documents."""

    added: int = 0
    removed: int = 0
    changed: int = 0
    unchanged: int = 0


def has_text(texts: Iterable[str]) -> bool:
    """Return whether there is more than blanks in the texts of a document, which is none otherwise."""
    return any(map(str.strip, texts))


def encodable_documents(
    documents: Texts, sources: Sources | None
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return documents and sources with ids and texts that can be stored; a text alone is a list of one."""
    texts = {
        # A text is an iterable of texts, too, of its characters.
        encodable(id): [encodable(one) for one in ([found] if isinstance(found, str) else found)]
        for id, found in documents.items()
    }
    return texts, {encodable(id): encodable(source) for id, source in (sources or {}).items()}


class KeptDocuments(ABC):
    """The interface of collections, which keep the KV of documents: by id, the texts that prompts may show.

    ``name`` tells the vector store from others, in this process and later ones.
    """

    name: str

    @abstractmethod
    def ids(self) -> set[str]:
        """Return the ids of the documents."""

    def add(
        self,
        documents: Texts,
        *,
        sources: Sources | None = None,
        progress: Progress | bool | None = False,
    ) -> SyncReport:
        """Keep the KV of these documents' texts; known ids are replaced, known texts cost nothing. A document
        without text is removed.

        ``sources``: what ids are parts of, such as a file. A text is prefilled behind that of the id that
        precedes it here in its source (setting ``context_tokens``); ids known with these texts stay as they
        are.
        ``progress``: show a bar; None: if someone is watching; or the caller's own. What an earlier call left
        undone is done too.
        Raises StoreFullError, and EngineError when the engine does not start; the documents stay registered.
        """
        return self._keep(documents, sources, progress, only=False)

    @abstractmethod
    def remove(self, ids: Iterable[str]) -> None:
        """Forget documents, and the KV of texts that no other document has. Texts that were prefilled behind
        theirs are prefilled anew."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all documents."""

    def sync(
        self,
        documents: Texts,
        *,
        sources: Sources | None = None,
        progress: Progress | bool | None = False,
    ) -> SyncReport:
        """Keep exactly ``documents``, and all of their KV: of two at once, one is as if it came after the
        other. ``sources``: as :meth:`add`."""
        return self._keep(documents, sources, progress, only=True)

    @abstractmethod
    def _keep(
        self, documents: Texts, sources: Sources | None, progress: Progress | bool | None, *, only: bool
    ) -> SyncReport:
        """Keep the KV of documents. only: and of no others."""


class Collection(KeptDocuments):
    """A collection of documents whose KV is kept by this process."""

    def __init__(self, library: Library, name: str) -> None:
        self.library, self.name = library, encodable(name)

    volatile = staticmethod(volatile)

    def ids(self) -> set[str]:
        begins = self._owner("")
        return {owner.removeprefix(begins) for owner in self.library.catalogue.owners(begins)}

    def among(self, ids: Iterable[str]) -> set[str]:
        """Return those of ``ids`` that it has."""
        owners = {self._owner(id): id for id in ids}
        return {owners[owner] for owner in self.library.catalogue.owned(owners)}

    def remove(self, ids: Iterable[str]) -> None:
        self.library.texts.release([self._owner(id) for id in ids])

    def clear(self) -> None:
        self.library.texts.release(self.library.catalogue.owners(self._owner("")))

    def _keep(
        self, documents: Texts, sources: Sources | None, progress: Progress | bool | None, *, only: bool
    ) -> SyncReport:
        report = SyncReport()
        named, parts = self._owned(documents, sources)
        owned = {owner: texts for owner, texts in named.items() if has_text(texts)}
        with progress_bar(progress) as bar:
            with self.library.texts.changing.mine():  # what is read here is what is changed
                catalogue = self.library.catalogue
                known = set(catalogue.owners(self._owner(""))) if only else catalogue.owned(named)
                gone = known - owned.keys()
                new = self.library.texts.register(owned, parts)
                if gone:  # last, so that a text which another document has now keeps its KV
                    self.library.texts.release(gone)
            self.library.texts.prefill(report, bar, self._owner(""))
        report.added, report.changed = len(new - known), len(new & known)
        report.unchanged, report.removed = len(owned) - len(new), len(gone)
        return report

    def _owned(self, documents: Texts, sources: Sources | None) -> tuple[Texts, Sources]:
        documents, sources = encodable_documents(documents, sources)
        owned = {self._owner(id): texts for id, texts in documents.items()}
        return owned, {self._owner(id): source for id, source in sources.items()}

    def _owner(self, id: str) -> str:
        return owner_of(self.name, encodable(id))
