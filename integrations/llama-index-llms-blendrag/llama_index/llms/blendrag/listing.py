"""The listing of nodes in other packages' vector stores: a line for each class, by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

from llama_index.core.schema import BaseNode, TextNode
from llama_index.core.vector_stores.simple import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from llama_index.core.vector_stores.utils import metadata_dict_to_node

from blendrag import vectorstores
from blendrag.errors import ConfigError

_NODE = "_node_content"
_AT_ONCE = 256  # ids in a question to a store


def _chroma(store: Any, _: ExitStack) -> vectorstores.VectorStore:
    client = SimpleNamespace(get_collection=lambda name: store._collection)
    return vectorstores.Chroma(client, store._collection.name)


def _postgres(store: Any, opened: ExitStack) -> vectorstores.VectorStore:
    store._initialize()
    connection = opened.enter_context(closing(store._engine.raw_connection()))
    return vectorstores.Postgres(connection, f"{store.schema_name}.{store._table_class.__tablename__}")


_LISTED: dict[str, Callable[[Any, ExitStack], vectorstores.VectorStore]] = {
    "ChromaVectorStore": _chroma,
    "LanceDBVectorStore": lambda s, _: vectorstores.Lance(s._connection, s._table_name),
    "MilvusVectorStore": lambda s, _: vectorstores.Milvus(s.client, s.collection_name),
    "PGVectorStore": _postgres,
    "QdrantVectorStore": lambda s, _: vectorstores.Qdrant(s.client, s.collection_name),
    "WeaviateVectorStore": lambda s, _: vectorstores.Weaviate(s.client, s.index_name),
}


def nodes_of(store: BasePydanticVectorStore) -> Iterator[BaseNode]:
    """Yield all nodes of a store. Raises ConfigError if it cannot list them, SourceError if it fails."""
    names = [base.__name__ for base in type(store).__mro__]
    listed = next((_LISTED[name] for name in names if name in _LISTED), None)
    if listed is None:
        kind = type(store).__bases__[-1].__name__
        raise ConfigError(f"{kind} cannot list its nodes: call sync(nodes), as with those of a docstore")
    with ExitStack() as opened:
        for page in vectorstores.read(listed(store, opened)):
            for id, fields in page:
                yield _node_of(id, fields)


def _node_of(id: str, fields: vectorstores.Fields) -> BaseNode:
    text = vectorstores.text_of(fields)
    for place in (fields, fields.get("metadata"), fields.get("metadata_")):
        if isinstance(place, Mapping) and place.get(_NODE):
            return metadata_dict_to_node(dict(place), text)
    return TextNode(id_=id, text=text or "")


def ids_of(store: BasePydanticVectorStore, asked: Iterable[str]) -> set[str]:
    """Return the ids, of at least those asked for, that are in the store. Raises ConfigError if it cannot
    tell."""
    if isinstance(store, SimpleVectorStore):
        return set(store.data.embedding_dict)
    try:
        return {node.node_id for node in nodes_of(store)}
    except ConfigError:
        ids = list(asked)
        parts = [ids[at : at + _AT_ONCE] for at in range(0, len(ids), _AT_ONCE)]
        try:
            return {node.node_id for part in parts for node in store.get_nodes(part)}
        except NotImplementedError:
            raise ConfigError(f"{type(store).__name__} cannot tell what it holds") from None
