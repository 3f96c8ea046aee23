"""``BlendChromaVectorStore``: a Chroma vector store that keeps the KV of what it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import MetadataFilters, VectorStoreQuery, VectorStoreQueryResult

from blendrag import Collection, KeptDocuments, SyncReport
from blendrag.errors import ConfigError, needs, noting
from llama_index.llms.blendrag.nodes import sources_by_id, texts_by_id
from llama_index.llms.blendrag.warming import found, keeping

with needs("llama-index-llms-blendrag[chroma]"):
    import chromadb
    from llama_index.vector_stores.chroma import ChromaVectorStore
    from llama_index.vector_stores.chroma.base import _to_chroma_filter

if TYPE_CHECKING:
    from llama_index.llms.blendrag.base import BlendLLM

T = TypeVar("T")


class BlendChromaVectorStore(ChromaVectorStore):
    """A ``ChromaVectorStore`` that prefills what is added and drops the KV of what is deleted.

    llm: whose KV is kept; may be set later, then call :meth:`sync`. Without one this is a ChromaVectorStore.
    bare_text: keep the KV of nodes without their metadata as well (see ``node_texts``); with metadata in the
    nodes this doubles what is computed and stored.

    Adding raises what ``Collection.add`` does; Chroma has the nodes then, and the next addition or
    :meth:`sync` prefills them. Asynchronous methods do not block the event loop.
    """

    bare_text: bool = True

    _llm: BlendLLM | None = PrivateAttr(default=None)

    def __init__(
        self, *args: Any, llm: BlendLLM | None = None, bare_text: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.bare_text, self._llm = bare_text, keeping(llm)

    @classmethod
    def from_collection(cls, collection: Any, **kwargs: Any) -> BlendChromaVectorStore:
        """Return the vector store of a Chroma collection. kwargs: as the class takes them, as in ``llm=``.
        Raises ConfigError for what is no collection."""
        if not isinstance(collection, chromadb.Collection):
            raise ConfigError(f"from_collection() takes a collection of Chroma's, not {collection!r}")
        return cls(chroma_collection=collection, **kwargs)

    @classmethod
    def class_name(cls) -> str:
        return "BlendChromaVectorStore"

    @property
    def llm(self) -> BlendLLM | None:
        """The model whose KV is kept."""
        return self._llm

    @llm.setter
    def llm(self, llm: BlendLLM | None) -> None:
        self._llm = llm

    def sync(self, *, show_progress: bool | None = None) -> SyncReport:
        """Make the KV store hold what the collection does, which others may have changed.

        show_progress: None shows a bar if someone is watching. Raises ConfigError if there is no llm.
        """
        if (kept := self._kept()) is None:
            raise ConfigError("nothing to keep KV for: give the vector store an llm before sync()")
        documents: dict[str, list[str]] = {}
        sources: dict[str, str] = {}
        # All ids at first: deletions shift what is counted.
        for ids in self._batches(self._collection.get(include=[])["ids"]):
            page = self._get(None, where={}, ids=ids)
            documents |= texts_by_id(page.nodes or (), self.bare_text)
            sources |= sources_by_id(page.nodes or ())
        return kept.sync(documents, sources=sources, progress=show_progress)

    # -- changes ------------------------------------------------------------------------------------------

    def add(
        self, nodes: Sequence[BaseNode], *, show_progress: bool | None = False, **add_kwargs: Any
    ) -> list[str]:
        """Add nodes, in batches that Chroma takes, and prefill them."""
        ids: list[str] = []
        for batch in self._batches(list(nodes)):
            added = super().add(batch, **add_kwargs)
            ids += added
            if (kept := self._kept()) is not None:
                # Read back: of an id that it knows already, Chroma keeps the node it has.
                held = {one.node_id: one for one in self._get(None, where={}, ids=added).nodes or ()}
                inserted = [held[id] for id in added if id in held]  # in their document's order
                texts, sources = texts_by_id(inserted, self.bare_text), sources_by_id(inserted)
                with noting("Chroma has these nodes; sync() computes the KV that is missing."):
                    kept.add(texts, sources=sources, progress=show_progress)
        return ids

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete the nodes that came of a document."""
        self._remove(self._collection.get(where={"document_id": ref_doc_id}, include=[])["ids"])

    def delete_nodes(  # type: ignore[override]  # filters: said to be a list, used as one
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        """Delete nodes: those of ``node_ids``, or that pass the filters, or both; without either, none."""
        if filters is not None and node_ids != []:
            where = _to_chroma_filter(filters)
            node_ids = self._collection.get(ids=node_ids, where=where, include=[])["ids"]
        self._remove(node_ids or [])

    def clear(self) -> None:
        """Delete all nodes."""
        self._remove(self._collection.get(include=[])["ids"])

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        return await asyncio.to_thread(self.add, nodes, **kwargs)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        await asyncio.to_thread(self.delete, ref_doc_id, **delete_kwargs)

    async def adelete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        await asyncio.to_thread(self.delete_nodes, node_ids, filters, **delete_kwargs)

    async def aclear(self) -> None:
        await asyncio.to_thread(self.clear)

    def _remove(self, ids: list[str]) -> None:
        for batch in self._batches(ids):
            self._collection.delete(ids=batch)
        if ids and (kept := self._kept()) is not None:
            kept.remove(ids)

    # -- queries ------------------------------------------------------------------------------------------

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Query; a running engine begins to load the KV of what is returned."""
        return found(self._llm, super().query(query, **kwargs), self.bare_text)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        return await asyncio.to_thread(self.query, query, **kwargs)

    # -- the collection -----------------------------------------------------------------------------------

    def _kept(self) -> KeptDocuments | None:
        if self._llm is None:
            return None
        return self._llm.collection(_name(self._collection, on_server=self._llm.base_url is not None))

    def _batches(self, items: list[T]) -> Iterator[list[T]]:
        size = self._collection._client.get_max_batch_size()
        return (items[at : at + size] for at in range(0, len(items), size))


def _name(collection: Any, *, on_server: bool) -> str:
    """Return a name that tells a Chroma collection from others, in later processes too if it outlives this
    one. on_server: from those of clients on other machines as well."""
    chroma = collection._client.get_settings()
    if on_server and (chroma.is_persistent or chroma.chroma_server_host):
        return f"llama-index/{collection.id}"
    if chroma.chroma_server_host:
        place = f"http://{chroma.chroma_server_host}:{chroma.chroma_server_http_port}"
    elif chroma.is_persistent:
        place = str(Path(chroma.persist_directory).resolve())
    else:
        return Collection.volatile(f"chroma/{collection.id}")
    return "/".join(("llama-index", place, collection.tenant, collection.database, collection.name))
