"""Other programs' vector stores, scrolled through: one interface, one registry, a file for each kind."""

from blendrag.vectorstores.chroma import Chroma
from blendrag.vectorstores.elastic import Elasticsearch, OpenSearch
from blendrag.vectorstores.following import StoreReport, read, sync
from blendrag.vectorstores.interface import STORES, Address, Fields, VectorStore, open_store, text_of
from blendrag.vectorstores.lance import Lance
from blendrag.vectorstores.milvus import Milvus
from blendrag.vectorstores.postgres import Postgres
from blendrag.vectorstores.qdrant import Qdrant
from blendrag.vectorstores.weaviate import Weaviate

__all__ = [
    "STORES",
    "Address",
    "Chroma",
    "Elasticsearch",
    "Fields",
    "Lance",
    "Milvus",
    "OpenSearch",
    "Postgres",
    "Qdrant",
    "StoreReport",
    "VectorStore",
    "Weaviate",
    "open_store",
    "read",
    "sync",
    "text_of",
]
