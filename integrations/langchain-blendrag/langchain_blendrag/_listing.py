"""The listing of documents in other packages' vector stores: a line for each class, by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from typing import Any

from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from blendrag import vectorstores
from blendrag.errors import ConfigError

_Listed = tuple[vectorstores.VectorStore, str]  # and the field of the text


def _pgvector(store: Any, opened: ExitStack) -> _Listed:
    if (engine := getattr(store, "_engine", None)) is None:
        raise ConfigError("a PGVector without a synchronous engine cannot list its documents: no sync()")
    connection = opened.enter_context(closing(engine.raw_connection()))
    return vectorstores.Postgres(connection, store.collection_name), "document"


_LISTED: dict[str, Callable[[Any, ExitStack], _Listed]] = {
    "ElasticsearchStore": lambda s, _: (vectorstores.Elasticsearch(s.client, s._store.index), s.query_field),
    "LanceDB": lambda s, _: (vectorstores.Lance(s._connection, s._table_name, s._id_key), s._text_key),
    "Milvus": lambda s, _: (vectorstores.Milvus(s.client, s.collection_name), s._text_field),
    "OpenSearchVectorSearch": lambda s, _: (vectorstores.OpenSearch(s.client, s.index_name), "text"),
    "PGVector": _pgvector,
    "QdrantVectorStore": lambda s, _: (
        vectorstores.Qdrant(s.client, s.collection_name),
        s.content_payload_key,
    ),
    "WeaviateVectorStore": lambda s, _: (vectorstores.Weaviate(s._client, s._index_name), s._text_key),
}


def documents_of(store: VectorStore) -> Iterator[tuple[str, Document]]:
    """Yield all documents of a store by id. Raises ConfigError if it cannot list them, SourceError if it
    fails."""
    if isinstance(store, InMemoryVectorStore):
        for id, stored in list(store.store.items()):
            yield id, Document(str(stored["text"]), metadata=stored["metadata"])
        return
    if hasattr(store, "index_to_docstore_id") and hasattr(store, "docstore"):  # FAISS
        for id in list(store.index_to_docstore_id.values()):
            if isinstance(found := store.docstore.search(id), Document):
                yield id, found
        return
    names = [base.__name__ for base in type(store).__mro__]
    listed = next((_LISTED[name] for name in names if name in _LISTED), None)
    if listed is None:
        raise ConfigError(f"{type(store).__bases__[-1].__name__} cannot list its documents: no sync()")
    with ExitStack() as opened:
        rows, field = listed(store, opened)
        for page in vectorstores.read(rows):
            for id, fields in page:
                if (text := vectorstores.text_of(fields, field)) is not None:
                    kept = fields.get("metadata", fields.get("cmetadata"))
                    yield id, Document(text, metadata=dict(kept if isinstance(kept, Mapping) else fields))
