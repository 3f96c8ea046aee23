"""``ServedIndex``: a folder of documents whose KV servers keep, and whose questions a server answers."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from blendrag.chat.request import ChatRequest, Source
from blendrag.embedder import Embedder
from blendrag.errors import StoreError
from blendrag.files.lock import IndexLock
from blendrag.index.answering import Answering, history_and_question
from blendrag.index.ingest import DocumentPipeline, IngestReport
from blendrag.index.ledger import Ledger
from blendrag.index.loaders import Document, Item
from blendrag.index.vectors import VectorStore
from blendrag.models import resolve_embedder
from blendrag.progress import Progress, progress_bar
from blendrag.remote.chat import RemoteChat
from blendrag.serving.collection import KeptDocuments
from blendrag.store.maintenance.closed_index import no_index


class ServedIndex(Answering):
    """An index whose KV and answers are servers'. Texts, vectors and the ledger are in its folder, as an
    index of ours has them.

    chats: one for each server. All are told of documents; the first splits them, and answers. An index that
    has KV of its own can be asked, but not ingested into: its chunks are others.
    """

    def __init__(self, root: Path, chats: Sequence[RemoteChat], *, create: bool = True) -> None:
        """Open an index. Raises StoreError if there is none and ``create`` is False."""
        root = root.expanduser().resolve()
        if not create and not (root / "ledger.sqlite").is_file():
            raise no_index(root)
        self.root, self.chats = root, tuple(chats)
        self._chat = self._first = self.chats[0]
        self.settings = self._first.settings
        embedder = self.settings.embedder
        made_with = Embedder(resolve_embedder(embedder), name=embedder)
        self._ledger = Ledger(root)
        self._vectors = VectorStore(root, made_with)

    def close(self) -> None:
        """End the connections. Safe to call twice."""
        self._ledger.close()
        self._vectors.close()
        for chat in self.chats:
            chat.close()

    def stats(self) -> dict[str, Any]:
        """Return how many documents there are."""
        return {"documents": len(self._ledger.sources())}

    # -- documents ----------------------------------------------------------------------------------------

    def ingest(self, items: Item | Iterable[Item], *, progress: bool | None = None) -> IngestReport:
        """Do as :meth:`BlendIndex.ingest`, and have every server keep the KV of exactly the documents here.
        May be interrupted and repeated, with other servers too."""
        if (self.root / "catalogue.sqlite").exists():
            raise StoreError(
                f"the index {str(self.root)!r} has KV of its own: name another folder for a server"
            )
        begin, report, s = time.perf_counter(), IngestReport(), self.settings
        lock = IndexLock(self.root)
        try:
            with progress_bar(progress) as bar:
                chunks = _Chunks(self._first)
                fingerprint = f"served chunk_tokens={s.chunk_tokens} chunk_overlap={s.chunk_overlap}"
                pipeline = DocumentPipeline(self.root, fingerprint, chunks, self._ledger, self._vectors)
                pipeline.take(items, report, bar)
                rows = self._vectors.rows()
                for chat in self.chats:
                    _tell(chat.collection(f"index-{self._vectors.id}"), rows, report, bar)
        finally:
            lock.release()
        report.total_s = time.perf_counter() - begin
        return report

    # -- questions ----------------------------------------------------------------------------------------

    def _asking(
        self, request: ChatRequest, found: Sequence[Source], left_out: Sequence[Source]
    ) -> ChatRequest:
        s, texts = self.settings, tuple(one.text for one in found)
        if not left_out:
            self._chat.prefetch(texts)
        history, question = history_and_question(request)
        system = [{"role": "system", "content": s.system_prompt}] if s.system_prompt else []
        messages = [*system, *history, {"role": "user", "content": s.separator.join([*texts, question])}]
        return replace(request, messages=messages, documents=texts)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Chunks that are made by a server, which knows the tokens."""

    chat: RemoteChat

    def register(self, document: Document) -> list[tuple[str, str]]:
        texts = self.chat.split(document.text)
        return [(xxhash.xxh3_128_hexdigest(text.encode()), text) for text in texts]

    def release(self, source: str) -> list[str]:
        return []

    def known(self, keys: Collection[str]) -> bool:
        return True


def _tell(kept: KeptDocuments, rows: Sequence[Source], report: IngestReport, bar: Progress) -> None:
    """Have a server keep these documents, and no others. A name stands for a place and a text, so one that is
    known is not sent."""
    wanted = {f"{row.source}#{row.ordinal}-{row.key}": row for row in rows}
    known = kept.ids()
    if missing := {id: row for id, row in wanted.items() if id not in known}:
        texts = {id: [row.text] for id, row in missing.items()}
        sources = {id: row.source for id, row in missing.items()}
        report.count(kept.add(texts, sources=sources, progress=bar))
    kept.remove(known - wanted.keys())  # last: a text that has another place now is kept
