"""Ingest: documents to chunks, vectors and KV. What is interrupted is taken up where it stopped.

Order is what makes it safe. A document counts as ingested (ledger) only after its chunks are registered
(catalogue) and searchable (vectors); KV that is missing is "pending" in the catalogue and prefilled by this
or any later ingest. A chunk without KV is still found and answered from, only more slowly. What documents
lose while others are taken belongs to ``LEAVING`` until the last is: texts that only move from one to another
keep their KV.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from blendrag.index.ledger import Ledger
from blendrag.index.loaders import Document, Item, Skipped, is_single, load_sources, roots, wholes
from blendrag.index.split import Splitter
from blendrag.index.vectors import VectorStore
from blendrag.progress import Progress
from blendrag.serving.prefill import PrefillReport
from blendrag.store.catalogue import Catalogue
from blendrag.store.contexts import Contexts

LEAVING = ""  # an owner of chunks; documents have names


@dataclass(slots=True, kw_only=True)
class IngestReport(PrefillReport):
    """A report of what an ingest did, in documents and in chunks.

    reread: the changed documents that an older version of the readers had read.
    """

    added: int = 0
    changed: int = 0
    reread: int = 0
    unchanged: int = 0
    removed: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    total_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_s": self.tokens_per_s}


class Chunks(Protocol):
    """An object that makes chunks of documents."""

    def register(self, document: Document) -> list[tuple[str, str]]:
        """Register a document's chunks; what it had before is ``LEAVING``. Returns their keys and texts."""

    def release(self, source: str) -> list[str]:
        """Forget a document, or what is ``LEAVING``. Returns keys whose KV can go."""

    def known(self, keys: Collection[str]) -> bool:
        """Return whether all of these are registered: a copy of the catalogue may have been taken back."""


@dataclass(frozen=True, slots=True)
class Chunking:
    """The making of chunks into the catalogue."""

    splitter: Splitter
    contexts: Contexts
    catalogue: Catalogue

    def register(self, document: Document) -> list[tuple[str, str]]:
        chunks = self.contexts.document(self.splitter.split(document.text))
        self.catalogue.register(document.source, chunks, heir=LEAVING)
        return [(chunk.key, chunk.text) for chunk in chunks]

    def release(self, source: str) -> list[str]:
        return self.catalogue.release(source)

    def known(self, keys: Collection[str]) -> bool:
        return len(self.catalogue.known(keys)) == len(set(keys))


@dataclass(frozen=True, slots=True)
class DocumentPipeline:
    """A pipeline that takes documents into ledger, chunks and vector store, or out of them."""

    root: Path
    fingerprint: str
    chunks: Chunks
    ledger: Ledger
    vectors: VectorStore

    def take(self, items: Item | Iterable[Item], report: IngestReport, progress: Progress) -> list[str]:
        """Add, replace and remove so that the index mirrors ``items``. Returns keys whose KV can go."""
        items = items if is_single(items) else list(items)
        tops, listed = roots(items), wholes(items)
        known, kept, unread = self.ledger.wholes(), set[str](), set[str]()
        torn = self.vectors.incomplete(self.ledger.chunk_counts())
        outdated = self.ledger.under(tops) & self.ledger.read_by_older()
        try:
            for loaded in load_sources(items, exclude=[self.root]):
                if isinstance(loaded, Skipped):
                    report.skipped.append(loaded)
                    if loaded.transient:  # a folder that could not be listed stands for what is in it
                        unread.add(loaded.source)
                    continue
                kept.add(loaded.source)
                progress.note(f"reading {len(kept)} documents")
                keys = self.ledger.chunk_keys(loaded.source)
                complete = loaded.source not in torn and self.chunks.known(keys)
                if complete and self.ledger.unchanged(loaded, self.fingerprint):
                    report.unchanged += 1
                    if known.get(loaded.source) != loaded.part_of:
                        self.ledger.set_part_of(loaded.source, loaded.part_of)
                    if loaded.source in outdated:
                        self.ledger.read_by_newest(loaded.source)
                    continue
                self._store(loaded)
                if loaded.source in known:
                    report.changed += 1
                    report.reread += loaded.source in outdated
                else:
                    report.added += 1
        finally:
            orphans = self.chunks.release(LEAVING)
        gone = self.ledger.under(tops) | {source for source, whole in known.items() if whole in listed}
        for source in sorted(gone - kept - self.ledger.under(unread)):
            orphans += self.remove(source)
            report.removed += 1
        return orphans

    def _store(self, document: Document) -> None:
        self.ledger.begin_storing(document)
        chunks = self.chunks.register(document)
        self.vectors.put(document.source, chunks, document.metadata)
        self.ledger.record(document, [key for key, _ in chunks], self.fingerprint)

    def remove(self, source: str) -> list[str]:
        """Take a document out of everything. Returns keys whose KV can go."""
        self.ledger.begin_removing(source)
        self.vectors.delete(source)
        orphans = self.chunks.release(source)
        self.ledger.forget(source)
        return orphans
