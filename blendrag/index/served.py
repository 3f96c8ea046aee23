"""``ServedIndex``: a folder of documents whose KV servers keep, and whose questions a server answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from blendrag.chat.request import ChatRequest, Source
from blendrag.errors import BlendragError, StoreError
from blendrag.files.lock import IndexLock
from blendrag.index.answering import Answering, history_and_question
from blendrag.index.ingest import DocumentPipeline, IngestReport
from blendrag.index.loaders import Item
from blendrag.progress import Progress
from blendrag.remote.chat import RemoteChat
from blendrag.serving.collection import KeptDocuments
from blendrag.store.contexts import Chunk
from blendrag.store.maintenance.closed_index import no_index
from blendrag.text import hash_of


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
        self.chats = tuple(chats)
        self._chat = self._first = self.chats[0]
        super().__init__(root, self._first.settings)

    def close(self) -> None:
        """End the connections. Safe to call twice."""
        super().close()
        for chat in self.chats:
            chat.close()

    # -- documents ----------------------------------------------------------------------------------------

    def ingest(self, items: Item | Iterable[Item], *, progress: bool | None = None) -> IngestReport:
        """Do as :meth:`BlendIndex.ingest`, and have every server keep the KV of exactly the documents here.
        May be interrupted and repeated, with other servers too."""
        if (self.root / "catalogue.sqlite").exists():
            raise StoreError(
                f"the index {str(self.root)!r} has KV of its own: name another folder for a server"
            )
        lock = IndexLock(self.root)
        try:
            return super().ingest(items, progress=progress)
        finally:
            lock.release()

    def _pipeline(self) -> DocumentPipeline:
        def split(text: str) -> list[Chunk]:  # by a server, which knows the tokens
            texts = self._first.split(text)
            return [Chunk(hash_of(one), one, ()) for one in texts]

        s = self.settings
        fingerprint = f"served chunk_tokens={s.chunk_tokens} chunk_overlap={s.chunk_overlap}"
        return DocumentPipeline(self.root, fingerprint, split, self._ledger, self._vectors)

    def _keep(self, orphans: list[str], report: IngestReport, bar: Progress) -> None:
        rows, failed = self._vectors.rows(), list[BlendragError]()
        for chat in self.chats:
            try:
                _tell(chat.collection(f"index-{self._vectors.id}"), rows, report, bar)
            except BlendragError as error:  # the others are told all the same
                failed.append(error)
        if failed:
            raise failed[0]

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
