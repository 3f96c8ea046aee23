"""``warm``: any LangChain vector store, with the KV of its documents kept."""

from __future__ import annotations

import functools
import inspect
import sys
import uuid
from collections.abc import Mapping
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, TypeVar

from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore

from blendrag import Collection
from blendrag.errors import ConfigError
from langchain_blendrag._ingest import encodable
from langchain_blendrag._listing import documents_of
from langchain_blendrag._warming import WarmingStore, followed, keeping

if TYPE_CHECKING:
    from langchain_blendrag.chat_models import ChatBlend

Store = TypeVar("Store", bound=VectorStore)


def warm(vectorstore: Store, llm: ChatBlend | None, name: str | None = None) -> Store:
    """Make a vector store compute the KV of what is added to it, and release that of what is removed.

    Args:
        vectorstore: Is changed and returned: its class becomes a subclass of the one it has, with
            ``ingest()`` and ``sync()`` like ``BlendChroma``. What it holds already is warm after ``sync()``.
        llm: The model whose KV is kept.
        name: Tells this store from others in later processes, for one that is saved or is on a server.
            Without it, the KV is released some time after this process has ended.

    Returns:
        The same object.
    """
    if not isinstance(vectorstore, VectorStore):
        raise ConfigError(f"warm() takes a vector store of LangChain's, not {vectorstore!r}")
    llm = keeping(llm)
    if not isinstance(vectorstore, WarmingStore):
        vectorstore.__class__ = _warm_class(type(vectorstore))  # type: ignore[assignment]
    assert isinstance(vectorstore, WarmingStore), "its class is one now"
    vectorstore.llm = llm
    if isinstance(vectorstore, _Warm) and name:
        vectorstore.__dict__["_name"] = f"warm/{name}"
    return vectorstore


@functools.cache
def _warm_class(base: type[VectorStore]) -> type[WarmingStore]:
    chroma = sys.modules.get("langchain_chroma")  # a Chroma store cannot be without it
    if chroma is not None and issubclass(base, chroma.Chroma):
        from langchain_blendrag.vectorstores import BlendChroma

        if base is chroma.Chroma:
            return BlendChroma
        return type(f"Blend{base.__name__}", (BlendChroma, base), {"__module__": base.__module__})
    hooks: dict[str, Any] = {"__module__": base.__module__}
    for name, then in _HOOKS.items():
        method = getattr(base, name, None)
        # LangChain's defaults call those that a store has.
        if inspect.isfunction(method) and method is not getattr(VectorStore, name, None):
            hooks[name] = followed(method, then, encodable if then is _added else None)
    return type(f"Warm{base.__name__}", (_Warm, base), hooks)


class _Warm(WarmingStore):
    def _kv_name(self) -> str:
        # One that was given no name, or that its class has made, gets its own.
        name: str = self.__dict__.setdefault("_name", Collection.volatile(f"warm/{uuid.uuid4().hex}"))
        return name

    def _documents(self) -> Mapping[str, Document]:
        return dict(documents_of(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Its class has no name by which pickle finds it.
        return _unpickled, (type(self).__bases__[-1],), self.__dict__


def _unpickled(base: type[VectorStore]) -> VectorStore:
    return object.__new__(_warm_class(base))


def _added(store: WarmingStore, arguments: Mapping[str, Any], ids: Any) -> None:
    items = arguments.get("documents") or arguments["first"]  # Milvus: behind the ids
    metadatas = chain(arguments.get("metadatas") or (), repeat(None))
    given = ids if isinstance(ids, list) else arguments.get("ids")
    store._warm(dict(zip(map(str, given or ()), map(_document, items, metadatas), strict=False)))


def _merged(store: WarmingStore, arguments: Mapping[str, Any], result: Any) -> None:
    if store._warms:
        known = store._collection_of_kv().ids()
        store._warm({id: one for id, one in store._documents().items() if id not in known})


def _document(item: Any, metadata: dict[str, Any] | None) -> Document:
    if isinstance(item, Document):
        return item
    text = item if isinstance(item, str) else str(item[0])  # FAISS: a text with its embedding
    return Document(text, metadata=metadata or {})


def _deleted(store: WarmingStore, arguments: Mapping[str, Any], success: Any) -> None:
    if success is False:
        return
    if arguments.get("delete_all"):  # Pinecone
        store._forget_all()
    elif (ids := arguments["first"]) is None or isinstance(ids, str):
        # Some remove all without ids, some by other arguments, some nothing; some take a text as its letters.
        store._forget_missing()
    else:
        store._forget(map(str, ids))


def _deleted_one(store: WarmingStore, arguments: Mapping[str, Any], success: Any) -> None:
    if success is not False:
        store._forget([str(arguments["first"])])


def _deleted_all(store: WarmingStore, arguments: Mapping[str, Any], success: Any) -> None:
    if success is not False and arguments["first"] is None:  # else of another index
        store._forget_all()


_ADDING = ("add_texts", "add_documents", "add_embeddings", "upsert")
_DELETING_ALL = ("clear", "delete_collection", "delete_index", "drop", "drop_tables")
_HOOKS = {
    f"{kind}{name}": then
    for names, then in (
        (_ADDING, _added),
        (("merge_from",), _merged),  # FAISS
        (("delete",), _deleted),
        (("delete_by_document_id",), _deleted_one),
        (("delete_by_metadata_filter",), lambda store, *_: store._forget_missing()),
        (_DELETING_ALL, _deleted_all),
    )
    for name in names
    for kind in ("", "a")
}
