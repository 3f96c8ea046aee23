"""Ingest: documents to chunks, vectors and KV. What is interrupted is taken up where it stopped.

Order is what makes it safe. A document counts as ingested (ledger) only after its chunks are registered
(catalogue) and searchable (vectors); KV that is missing is "pending" in the catalogue and prefilled by this
or any later ingest. A chunk without KV is still found and answered from, only more slowly. What documents
lose while others are taken belongs to ``LEAVING`` until the last is: texts that only move from one to another
keep their KV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blendrag.index.ledger import Ledger
from blendrag.index.loaders import Document, Item, Skipped, is_single, load, resolved, source_of
from blendrag.index.vectors import VectorStore
from blendrag.progress import Progress
from blendrag.serving.owners import with_repeats
from blendrag.serving.prefill import PrefillReport
from blendrag.store.catalogue import Catalogue
from blendrag.store.contexts import Chunk

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


@dataclass(frozen=True, slots=True)
class DocumentPipeline:
    """A pipeline that takes documents into ledger, catalogue and vector store, or out of them.

    split: makes the chunks of a text. catalogue: None where servers have the chunks.
    """

    root: Path
    fingerprint: str
    split: Callable[[str], Sequence[Chunk]]
    ledger: Ledger
    vectors: VectorStore
    catalogue: Catalogue | None = None

    def take(self, items: Item | Iterable[Item], report: IngestReport, progress: Progress) -> list[str]:
        """Add, replace and remove so that the index mirrors ``items``. Returns keys whose KV can go."""
        targets = resolved(items)
        tops = [source_of(target) for target in targets if isinstance(target, Path)]
        listed = set[str]()  # the sources of which the items are all that there is
        if not is_single(items):  # a document alone is one part of many
            listed = {target.part_of for target in targets if isinstance(target, Document)}
        known, kept, unread = self.ledger.wholes(), set[str](), set[str]()
        torn = self.vectors.incomplete(self.ledger.chunk_counts())
        outdated = self.ledger.under(tops) & self.ledger.read_by_older()
        try:
            for loaded in load(targets, exclude=[self.root]):
                if isinstance(loaded, Skipped):
                    report.skipped.append(loaded)
                    if loaded.transient:  # a folder that could not be listed stands for what is in it
                        unread.add(loaded.source)
                    continue
                kept.add(loaded.source)
                progress.note(f"reading {len(kept)} documents")
                complete = loaded.source not in torn and self._registered(loaded.source)
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
            orphans = self._release(LEAVING)
        gone = self.ledger.under(tops) | {source for source, whole in known.items() if whole in listed}
        for source in sorted(gone - kept - self.ledger.under(unread)):
            orphans += self.remove(source)
            report.removed += 1
        return orphans

    def _store(self, document: Document) -> None:
        self.ledger.begin_storing(document)
        chunks = self.split(document.text)
        if self.catalogue is not None:
            self.catalogue.register(document.source, chunks, heir=LEAVING)
        self.vectors.put(document.source, [(chunk.key, chunk.text) for chunk in chunks], document.metadata)
        self.ledger.record(document, [chunk.key for chunk in chunks], self.fingerprint)

    def _registered(self, source: str) -> bool:
        """Return whether a document's chunks are: a copy of the catalogue may have been taken back."""
        keys = set(self.ledger.chunk_keys(source))
        return self.catalogue is None or self.catalogue.known(keys) == keys

    def _release(self, owner: str) -> list[str]:
        if self.catalogue is None:
            return []
        return self.catalogue.release(*with_repeats(self.catalogue, [owner]))

    def remove(self, source: str) -> list[str]:
        """Take a document out of everything. Returns keys whose KV can go."""
        self.ledger.begin_removing(source)
        self.vectors.delete(source)
        orphans = self._release(source)
        self.ledger.forget(source)
        return orphans
