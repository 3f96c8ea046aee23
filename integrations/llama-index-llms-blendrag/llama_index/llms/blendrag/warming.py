"""``warm``: any LlamaIndex vector store, with the KV of its nodes kept."""

from __future__ import annotations

import asyncio
import functools
import logging
import types
import uuid
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)

from blendrag import Collection, KeptDocuments, SyncReport, spellings
from blendrag.errors import ConfigError, noting
from llama_index.llms.blendrag.listing import ids_of, nodes_of
from llama_index.llms.blendrag.nodes import node_texts, sources_by_id, texts_by_id

if TYPE_CHECKING:
    from llama_index.llms.blendrag.base import BlendLLM

Store = TypeVar("Store", bound=BasePydanticVectorStore)

_Base: Any = object  # in front of a vector store's class, whose fields would be declared twice
_BEHIND_DOCUMENT = "\x1e"  # in the name of a node that is kept: its document's id is in front
_log = logging.getLogger(__name__)
# Stores call their own methods: only the outermost call is of interest.
_quiet: ContextVar[object] = ContextVar("blendrag_quiet_store", default=None)


@dataclass(slots=True)
class _Whose:
    llm: BlendLLM | None
    name: str
    bare_text: bool


def keeping(llm: BlendLLM | None) -> BlendLLM | None:
    """Return the model whose KV is to be kept. Raises ConfigError for one that keeps none."""
    if llm is not None and not hasattr(llm, "collection"):
        raise ConfigError(f"llm has to be a BlendLLM, whose engine keeps KV, not a {type(llm).__name__}")
    return llm


def warm(
    vector_store: Store, llm: BlendLLM | None, name: str | None = None, *, bare_text: bool = True
) -> Store:
    """Make a vector store compute the KV of nodes that are added to it, and release that of what is removed.

    vector_store: is changed and returned: its class becomes a subclass of the one it has, with ``sync()``.
    What it holds already is warm after that. llm: whose KV is kept. name: tells this store from others in
    later processes; without one, the KV is released some time after this process has ended. bare_text: keep
    the KV of nodes without their metadata as well (see ``node_texts``).
    """
    if not isinstance(vector_store, BasePydanticVectorStore):
        raise ConfigError(f"warm() takes a vector store of LlamaIndex's, not {vector_store!r}")
    llm = keeping(llm)
    if not isinstance(vector_store, WarmKV) and hasattr(type(vector_store), "llm"):  # BlendChromaVectorStore
        vector_store.llm = llm  # type: ignore[attr-defined]
        return vector_store
    if not isinstance(vector_store, WarmKV):
        vector_store.__class__ = _warm_class(type(vector_store))  # type: ignore[assignment]
    kept = f"llama-index/{name}" if name else Collection.volatile(f"llama-index/{uuid.uuid4().hex}")
    vector_store.__dict__["_whose"] = _Whose(llm, kept, bare_text)
    return vector_store


@functools.cache
def _warm_class(base: type[BasePydanticVectorStore]) -> type[BasePydanticVectorStore]:
    named = {"__module__": base.__module__}
    return types.new_class(f"Warm{base.__name__}", (WarmKV, base), exec_body=lambda body: body.update(named))


def _unpickled(base: type[Store], state: dict[str, Any], whose: _Whose) -> Store:
    store = base.__new__(base)
    store.__setstate__(state)
    warm(store, whose.llm, bare_text=whose.bare_text).__dict__["_whose"] = whose
    return store


class WarmKV(_Base):
    """A mixin that keeps the KV of a vector store's nodes; :func:`warm` puts it in front of its class.

    Adding raises what ``Collection.add`` does; the store has the nodes then, and the next addition or
    :meth:`sync` prefills them. Asynchronous methods do not block the event loop.
    """

    _whose = _Whose(None, "", True)  # of one that its class made: no model's yet

    def __new__(cls, *_: Any, **__: Any) -> Any:
        if cls is WarmKV:  # a transformation, in the version before
            raise ConfigError("WarmKV is put before a vector store: warm(vector_store, llm)")
        return super().__new__(cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Its class has no name by which pickle finds it.
        state: Any = self.__getstate__()
        plain = {name: value for name, value in state["__dict__"].items() if name != "_whose"}
        return _unpickled, (type(self).__bases__[-1], {**state, "__dict__": plain}, self._whose)

    def sync(
        self, nodes: Iterable[BaseNode] | None = None, *, show_progress: bool | None = None
    ) -> SyncReport:
        """Keep the KV of exactly what the store holds, which others may have changed.

        nodes: all of these, for a store that cannot list its own, as in ``index.docstore.docs.values()``.
        show_progress: None shows a bar if someone is watching. Raises ConfigError if there is no llm, or the
        store cannot list its nodes, and SourceError if it fails at that.
        """
        if (kept := self._kept()) is None:
            raise ConfigError("nothing to keep KV for: give the vector store an llm before sync()")
        texts, sources = self._parts_of(nodes_of(self) if nodes is None else nodes)
        return kept.sync(texts, sources=sources, progress=show_progress)

    # -- changes ------------------------------------------------------------------------------------------

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Add nodes, and prefill them."""
        nodes = list(nodes)
        with self._quietly():
            ids = super().add(nodes, **kwargs)
        self._keep(nodes)
        return ids

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        nodes = list(nodes)
        with self._quietly():
            ids = await super().async_add(nodes, **kwargs)
        await asyncio.to_thread(self._keep, nodes)
        return ids

    def delete(self, ref_doc_id: str, **kwargs: Any) -> None:
        """Delete the nodes that came of a document."""
        with self._quietly():
            super().delete(ref_doc_id, **kwargs)
        self._forget_document(ref_doc_id)

    async def adelete(self, ref_doc_id: str, **kwargs: Any) -> None:
        with self._quietly():
            await super().adelete(ref_doc_id, **kwargs)
        await asyncio.to_thread(self._forget_document, ref_doc_id)

    def delete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **kwargs: Any,
    ) -> None:
        """Delete nodes by their ids, by filters, or by both, as the store does."""
        with self._quietly():
            super().delete_nodes(node_ids, **_given(filters), **kwargs)
        self._forget_nodes(node_ids, filters)

    async def adelete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **kwargs: Any,
    ) -> None:
        with self._quietly():
            await super().adelete_nodes(node_ids, **_given(filters), **kwargs)
        await asyncio.to_thread(self._forget_nodes, node_ids, filters)

    def clear(self) -> None:
        """Delete all nodes."""
        with self._quietly():
            super().clear()
        self._forget_all()

    async def aclear(self) -> None:
        with self._quietly():
            await super().aclear()
        await asyncio.to_thread(self._forget_all)

    # -- queries ------------------------------------------------------------------------------------------

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Query; a running engine begins to load the KV of what is returned."""
        with self._quietly():
            result = super().query(query, **kwargs)
        return self._found(result)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        with self._quietly():
            result = await super().aquery(query, **kwargs)
        return await asyncio.to_thread(self._found, result)

    def _found(self, result: VectorStoreQueryResult) -> VectorStoreQueryResult:
        return found(self._whose.llm, result, self._whose.bare_text) if self._warms else result

    # -- the KV of its nodes ------------------------------------------------------------------------------

    @property
    def llm(self) -> BlendLLM | None:
        """The model whose KV is kept. May be changed; :meth:`sync` then catches up."""
        return self._whose.llm

    @llm.setter
    def llm(self, llm: BlendLLM | None) -> None:
        if self._whose.name:
            self._whose.llm = llm
        else:
            warm(self, llm)

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        token = _quiet.set(self)
        try:
            yield
        finally:
            _quiet.reset(token)

    @property
    def _warms(self) -> bool:
        return self._whose.llm is not None and _quiet.get() is not self

    def _kept(self) -> KeptDocuments | None:
        llm = self._whose.llm
        return llm.collection(self._whose.name) if llm is not None and self._warms else None

    def _parts_of(self, nodes: Iterable[BaseNode]) -> tuple[dict[str, list[str]], dict[str, str]]:
        nodes = list(nodes)
        names = {node.node_id: f"{node.ref_doc_id or ''}{_BEHIND_DOCUMENT}{node.node_id}" for node in nodes}
        texts, sources = texts_by_id(nodes, self._whose.bare_text), sources_by_id(nodes)
        return (
            {names[id]: shown for id, shown in texts.items()},
            {names[id]: source for id, source in sources.items()},
        )

    def _keep(self, nodes: Sequence[BaseNode]) -> None:
        if nodes and (kept := self._kept()) is not None:
            texts, sources = self._parts_of(nodes)
            with noting("The vector store has these nodes; sync() computes the KV that is missing."):
                kept.add(texts, sources=sources)

    def _forget_document(self, ref_doc_id: str) -> None:
        if (kept := self._kept()) is not None:
            with noting("The nodes are removed; sync() releases their KV."):
                names = kept.ids()
                own = {name for name in names if _document(name) == ref_doc_id}
                # Of a node that was added again, of another document, stores keep the former or the latter.
                with suppress(ConfigError):
                    own |= self._gone(_names_of(map(_node, own), names) - own)
                kept.remove(own)

    def _forget_nodes(self, node_ids: Sequence[str] | None, filters: MetadataFilters | None) -> None:
        nothing = filters is None and node_ids is not None and not node_ids
        if nothing or (kept := self._kept()) is None:
            return
        with noting("The nodes are removed; sync() releases their KV."):
            names = kept.ids()
            if node_ids:
                names = _names_of(node_ids, names)
            if filters is not None or not node_ids:  # without either, some stores remove all
                try:
                    names = self._gone(names)
                except ConfigError:
                    kind = type(self).__bases__[-1].__name__
                    _log.warning("%s cannot tell what it removed: KV of it may be kept", kind)
                    return
            kept.remove(names)

    def _gone(self, names: Set[str]) -> set[str]:
        """Return those of ``names`` whose nodes the store lacks. Raises ConfigError if it cannot tell."""
        found = ids_of(self, map(_node, names)) if names else ()
        there = {form for id in found for form in spellings(id)}
        return {name for name in names if _node(name) not in there}

    def _forget_all(self) -> None:
        if (kept := self._kept()) is not None:
            with noting("The nodes are removed; sync() releases their KV."):
                kept.clear()


def _given(filters: MetadataFilters | None) -> dict[str, Any]:
    """Return the argument, for stores that know none, too."""
    return {} if filters is None else {"filters": filters}


def _document(name: str) -> str:
    return name.partition(_BEHIND_DOCUMENT)[0]


def _node(name: str) -> str:
    return name.partition(_BEHIND_DOCUMENT)[2]


def _names_of(ids: Iterable[str], names: Iterable[str]) -> set[str]:
    """Return those of ``names`` that are of nodes with these ids."""
    forms = {form for id in ids for form in spellings(id)}
    return {name for name in names if _node(name) in forms}


def found(llm: BlendLLM | None, result: VectorStoreQueryResult, bare_text: bool) -> VectorStoreQueryResult:
    """Begin to load the KV of what a query found, and return it in the order that the setting ``order`` asks
    for. A query never fails because of it."""
    if llm is None or not result.nodes:
        return result
    try:
        texts = [node_texts(node, bare_text) for node in result.nodes]
        llm.prefetch(text for texts_of_one in texts for text in texts_of_one)
        places = llm.order([texts_of_one[0] for texts_of_one in texts])
    except Exception:
        _log.debug("no KV was loaded ahead, nor nodes ordered", exc_info=True)
        return result
    nodes, similarities, ids = result.nodes, result.similarities, result.ids
    result.nodes = [nodes[place] for place in places]
    result.similarities = similarities and [similarities[place] for place in places]
    result.ids = ids and [ids[place] for place in places]
    return result
