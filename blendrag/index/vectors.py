"""The vector store: chunks' texts and vectors, in a Chroma collection on disk."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from blendrag.chat.request import Source
from blendrag.embedder import Embedder
from blendrag.errors import (
    EngineClosedError,
    EngineError,
    StoreError,
    StoreFullError,
    StoreMismatchError,
    needs,
)
from blendrag.files import hnsw, sqlite
from blendrag.files.private import make_file, make_folder
from blendrag.text import encodable, hash_of

_COLLECTION = "chunks"
_PAGE = 1000  # rows read at once: Chroma holds a whole answer in memory

# What a row has beside its text. A document's metadata is one of it, as JSON: Chroma refuses some names and
# nested values, and keeps names that a later version of the document has no more.
_SOURCE, _KEY, _ORDINAL, _METADATA = "source", "chunk_key", "ordinal", "metadata_json"

_ANEW = "if its files are damaged, remove the index's folder chroma and ingest again, which keeps the KV"


class VectorStore:
    """A store of rows (source, ordinal, chunk key, text, vector), searched by cosine similarity.

    Raises StoreMismatchError when the store was made with another embedding model, StoreError when Chroma
    cannot open, read or change it, StoreFullError when the disk is full, EngineClosedError once it is closed,
    and EngineError in a fork of the process that opened it.
    """

    def __init__(self, root: Path, embedder: Embedder) -> None:
        with needs("blendrag[index]"):
            import chromadb
            from chromadb.api.shared_system_client import SharedSystemClient

        self._embedder, self._closed, self._pid = embedder, False, os.getpid()
        self._folder = folder = root / "chroma"
        try:
            make_folder(folder)
            make_file(folder / "chroma.sqlite3")
            if torn := hnsw.broken(folder):
                raise ValueError(f"files are lost or cut off in {str(torn[0])!r}")
            self._client = chromadb.PersistentClient(
                str(folder), settings=chromadb.Settings(anonymized_telemetry=False)
            )
            _leave_to_parent()
            self._collection = self._client.get_or_create_collection(
                _COLLECTION,
                metadata={"embedder": embedder.name},  # kept from the first time
                configuration={"hnsw": {"space": "cosine"}},
                embedding_function=None,
            )
        except (OSError, ValueError, chromadb.errors.ChromaError) as error:
            self.close()
            # Chroma keeps what it could not start, and would fail with an AttributeError the next time.
            if not getattr(SharedSystemClient, "_identifier_to_refcount", {}).get(str(folder)):
                SharedSystemClient._identifier_to_system.pop(str(folder), None)
            raise StoreError(f"cannot open the vector store {str(folder)!r}: {error}; {_ANEW}") from error
        made_with = (self._rows.metadata or {}).get("embedder")
        if made_with != embedder.name:
            self.close()
            raise StoreMismatchError(
                f"the index {str(root)!r} was made with the embedder {made_with!r}, not {embedder.name!r}"
            )

    def put(
        self, source: str, pieces: Sequence[tuple[str, str]], metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Replace the rows of a source by these (chunk key, text) pieces.

        New rows are written before surplus old ones are deleted: a search in between finds the document.
        """
        ids = [f"{hash_of(source)}-{ordinal}" for ordinal in range(len(pieces))]
        surplus = self._ids_of(source) - set(ids)
        shared = {_SOURCE: source, _METADATA: json.dumps(dict(metadata or {}))}
        batch = self._client.get_max_batch_size()
        for at in range(0, len(pieces), batch):
            part = pieces[at : at + batch]
            texts = [text for _, text in part]
            embeddings = self._embedder.embed(texts)
            with self._failures():
                self._rows.upsert(
                    ids=ids[at : at + batch],
                    documents=texts,
                    embeddings=embeddings,
                    metadatas=[
                        shared | {_KEY: key, _ORDINAL: at + ordinal} for ordinal, (key, _) in enumerate(part)
                    ],
                )
        self._delete_ids(sorted(surplus))

    def delete(self, source: str) -> None:
        """Remove the rows of a source; without any, nothing happens."""
        self._delete_ids(sorted(self._ids_of(source)))

    def purge(self, source: str) -> int:
        """Do as :meth:`delete`, and overwrite what Chroma would keep of the texts. Returns how many rows
        there were.

        Chroma's log has a row's text until a thousand later changes, its word index until the next merge,
        and SQLite in its free pages; its files of vectors may have any text, by chance. Raises StoreError if
        a file cannot be rewritten; the rows are gone.
        """
        ids = sorted(self._ids_of(source))
        self._delete_ids(ids)
        with sqlite.opened(self._folder / "chroma.sqlite3") as db:
            db.executemany("UPDATE embeddings_queue SET metadata = NULL WHERE id = ?", [(id,) for id in ids])
            db.execute("INSERT INTO embedding_fulltext_search(embedding_fulltext_search) VALUES('optimize')")
        sqlite.compact(self._folder / "chroma.sqlite3")
        try:
            hnsw.clear_unused(self._folder)
        except OSError as error:
            raise StoreError(f"cannot overwrite unused space in {str(self._folder)!r}: {error}") from error
        return len(ids)

    def search(self, query: str, k: int) -> list[Source]:
        """Return the ``k`` chunks most like the query, best first."""
        total = self._count()
        if k < 1 or not total:
            return []
        vectors = self._embedder.embed([encodable(query)])
        wanted = k
        while True:
            wanted = min(wanted, total)
            with self._failures():
                answer = self._rows.query(
                    query_embeddings=vectors,
                    n_results=wanted,
                    include=["documents", "metadatas", "distances"],
                )
            columns = (answer[name][0] for name in ("documents", "metadatas", "distances"))
            hits = [_hit(text, row, 1.0 - distance) for text, row, distance in zip(*columns, strict=True)]
            best: dict[str, Source] = {}
            for hit in hits:
                best.setdefault(hit.key, hit)
            # The same text may stand in many documents: ask for more rows until there are k different ones.
            if len(best) >= k or len(hits) < wanted or wanted == total:
                return list(best.values())[:k]
            wanted *= 4

    @property
    def id(self) -> str:
        """A name that tells this store from all others."""
        return str(self._rows.id)

    def rows(self) -> list[Source]:
        """Return all rows, in the order of their documents."""
        found: list[Source] = []
        for offset in range(0, self._count(), _PAGE):
            with self._failures():
                page = self._rows.get(limit=_PAGE, offset=offset, include=["documents", "metadatas"])
            found += map(_hit, page["documents"], page["metadatas"])
        return sorted(found, key=lambda row: (row.source, row.ordinal))

    def incomplete(self, expected: Mapping[str, int]) -> set[str]:
        """Return the sources that have fewer rows than expected, where the number of all is another, too."""
        if self._count() == sum(expected.values()):
            return set()
        with self._failures():
            held = Counter(id.rpartition("-")[0] for id in self._rows.get(include=[])["ids"])
        return {source for source, rows in expected.items() if held[hash_of(source)] < rows}

    def close(self) -> None:
        """Close its files. Safe to call twice."""
        self._closed = True
        if self._pid == os.getpid():  # Chroma's threads are not in a fork: it would wait for them
            with contextlib.suppress(AttributeError):  # Chroma before 1.5 keeps them open
                self._client.close()

    @property
    def _rows(self) -> Any:
        """Return Chroma's collection. What a closed one raises says nothing of that."""
        if self._closed:
            raise EngineClosedError(f"{str(self._folder.parent)!r} was closed: open it again")
        if self._pid != os.getpid():
            raise EngineError(
                f"this index belongs to process {self._pid}, not to its fork {os.getpid()}:"
                " open it after forking, or use the spawn start method"
            )
        return self._collection

    def _count(self) -> int:
        with self._failures():
            return int(self._rows.count())

    def _ids_of(self, source: str) -> set[str]:
        with self._failures():
            return set(self._rows.get(where={_SOURCE: source}, include=[])["ids"])

    def _delete_ids(self, ids: Sequence[str]) -> None:
        batch = self._client.get_max_batch_size()
        for at in range(0, len(ids), batch):
            with self._failures():
                self._rows.delete(ids=list(ids[at : at + batch]))

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Raise StoreFullError or StoreError for what Chroma raises inside."""
        from chromadb.errors import ChromaError

        try:
            yield
        except ChromaError as error:
            if "disk is full" in str(error):  # SQLite's words; there is no code
                raise StoreFullError(f"the vector store failed: {error}") from error
            raise StoreError(f"the vector store failed: {error}; {_ANEW}") from error


@functools.cache
def _leave_to_parent() -> None:
    """Have forks of this process neither use nor free what Chroma has started. They would wait for threads
    that a fork has not."""
    from chromadb.api.shared_system_client import SharedSystemClient

    def leave() -> None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(SharedSystemClient._identifier_to_system))
        SharedSystemClient._identifier_to_system = {}
        SharedSystemClient._identifier_to_refcount = {}

    os.register_at_fork(after_in_child=leave)


def _hit(text: str, row: Mapping[str, Any], score: float = 1.0) -> Source:
    metadata = json.loads(row.get(_METADATA, "{}"))  # rows of earlier versions have none
    return Source(str(row[_SOURCE]), int(row[_ORDINAL]), score, text, str(row[_KEY]), metadata=metadata)
