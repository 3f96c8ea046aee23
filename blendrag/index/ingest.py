"""Ingest: documents to chunks, vectors and KV. What is interrupted is taken up where it stopped.

Order is what makes it safe. A document counts as ingested (ledger) only after its chunks are registered
(catalogue) and searchable (vectors); KV that is missing is "pending" in the catalogue and prefilled by this
or any later ingest. A chunk without KV is still found and answered from, only more slowly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from blendrag.index.ledger import Ledger
from blendrag.index.loaders import Document, Item, Skipped, load_sources, roots
from blendrag.index.split import Splitter
from blendrag.index.vectors import VectorStore
from blendrag.progress import Progress
from blendrag.serving.prefill import PrefillReport
from blendrag.store.catalogue import Catalogue
from blendrag.store.contexts import Contexts


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

    def register(self, document: Document) -> tuple[list[tuple[str, str]], list[str]]:
        """Register a document's chunks. Returns their keys and texts; and keys whose KV can go."""

    def release(self, source: str) -> list[str]:
        """Forget a document. Returns keys whose KV can go."""


@dataclass(frozen=True, slots=True)
class Chunking:
    """The making of chunks into the catalogue."""

    splitter: Splitter
    contexts: Contexts
    catalogue: Catalogue

    def register(self, document: Document) -> tuple[list[tuple[str, str]], list[str]]:
        chunks = self.contexts.document(self.splitter.split(document.text))
        orphans = self.catalogue.register(document.source, chunks)
        return [(chunk.key, chunk.text) for chunk in chunks], orphans

    def release(self, source: str) -> list[str]:
        return self.catalogue.release(source)


@dataclass(frozen=True, slots=True)
class DocumentPipeline:
    """A pipeline that takes documents into the ledger, what makes chunks of them, and the vector store; or
    out of them."""

    root: Path
    fingerprint: str
    chunks: Chunks
    ledger: Ledger
    vectors: VectorStore

    def take(self, items: Item | Iterable[Item], report: IngestReport, progress: Progress) -> list[str]:
        """Add, replace and remove so that the index mirrors ``items``. Returns keys whose KV can go."""
        known, kept, orphans = self.ledger.sources(), set[str](), list[str]()
        items = [items] if isinstance(items, str | Path | Document) else items
        items = items if hasattr(items, "page_content") else list(items)
        outdated = self.ledger.under(roots(items)) & self.ledger.read_by_older()
        for loaded in load_sources(items, exclude=[self.root]):
            if isinstance(loaded, Skipped):
                report.skipped.append(loaded)
                if loaded.transient:
                    kept.add(loaded.source)
                continue
            kept.add(loaded.source)
            progress.note(f"reading {len(kept)} documents")
            if self.ledger.unchanged(loaded, self.fingerprint):
                report.unchanged += 1
                if loaded.source in outdated:
                    self.ledger.read_by_newest(loaded.source)
                continue
            orphans += self._store(loaded)
            if loaded.source in known:
                report.changed += 1
                report.reread += loaded.source in outdated
            else:
                report.added += 1
        for source in sorted(self.ledger.under(roots(items)) - kept):
            orphans += self.remove(source)
            report.removed += 1
        return orphans

    def _store(self, document: Document) -> list[str]:
        self.ledger.forget(document.source)
        chunks, orphans = self.chunks.register(document)
        self.vectors.put(document.source, chunks, document.metadata)
        self.ledger.record(document, [key for key, _ in chunks], self.fingerprint)
        return orphans

    def remove(self, source: str) -> list[str]:
        """Take a document out of everything. Returns keys whose KV can go."""
        self.ledger.forget(source)
        self.vectors.delete(source)
        return self.chunks.release(source)
