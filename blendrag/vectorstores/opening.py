"""Opening the store that a URL names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from blendrag.vectorstores import (  # noqa: F401  (each registers itself)
    chroma,
    elastic,
    lance,
    milvus,
    postgres,
    qdrant,
    weaviate,
)
from blendrag.vectorstores.interface import STORES, Address, VectorStore, failures


@contextmanager
def open_store(at: Address) -> Iterator[VectorStore]:
    """Open a store by its client, and end the connection behind the block. Raises MissingDependencyError
    without the client, SourceError where no store answers."""
    with failures(at):
        store = STORES[at.kind].connect(at)
    with closing(store):
        yield store
