"""``BlendChroma``: LangChain's Chroma, with the KV of its documents kept."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document

from blendrag import Collection
from blendrag.errors import needs
from langchain_blendrag._ingest import encodable
from langchain_blendrag._warming import PAGE, WarmingStore, keeping

with needs("langchain-blendrag[chroma]"):
    from langchain_chroma import Chroma

if TYPE_CHECKING:
    from langchain_blendrag.chat_models import ChatBlend

_PICTURE = re.compile(r"[A-Za-z0-9+/]{256,}={0,2}")  # add_images keeps them in base64, as if they were texts


class BlendChroma(WarmingStore, Chroma):
    """A Chroma vector store that computes the KV of its documents when they are added.

    A drop-in for ``langchain_chroma.Chroma``: the same arguments, and ``llm``. What is added, updated,
    removed or reset, also by the indexing API, is prefilled or released; a text that several documents have
    is prefilled once. Searches begin to load the KV of what they found. Without ``llm`` it is Chroma.

    Additions of any size are stored in batches that Chroma accepts. After a failure, earlier batches are
    stored and warm.

    Example:
        ```python
        store = BlendChroma("handbook", embeddings, persist_directory="db", llm=ChatBlend())
        store.ingest(PyPDFLoader("handbook.pdf").lazy_load())
        ```
    """

    def __init__(self, *args: Any, llm: ChatBlend | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.llm = keeping(llm)

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add texts, and compute their KV.

        Raises:
            BlendragError: If the KV cannot be computed. The texts are stored, and ``sync()`` does the rest.
        """
        texts = list(map(encodable, texts))
        given = list(ids) if ids is not None else [str(uuid.uuid4()) for _ in texts]
        if metadatas:
            metadatas = [*metadatas, *[{}] * (len(texts) - len(metadatas))]
        added = []
        for at in range(0, max(len(texts), len(given), 1), size := self._client.get_max_batch_size()):
            part = slice(at, at + size)
            stored = super().add_texts(
                texts[part], metadatas[part] if metadatas else None, given[part], **kwargs
            )
            described = metadatas[part] if metadatas else [{}] * len(stored)
            self._warm(
                {
                    id: Document(text, metadata=metadata or {})
                    for id, text, metadata in zip(stored, texts[part], described, strict=True)
                }
            )
            added += stored
        return added

    def add_images(self, uris: list[str], *args: Any, **kwargs: Any) -> list[str]:
        """Add images. They are no text: no KV is computed."""
        added = super().add_images(uris, *args, **kwargs)
        self._forget(added)  # of texts that had these ids
        return added

    def update_documents(self, ids: list[str], documents: list[Document]) -> None:
        """Replace documents, and the KV of their texts. Chroma leaves out unknown ids."""
        documents = list(map(encodable, documents))
        super().update_documents(ids, documents)
        if self._warms:
            present = self._present(ids)
            self._warm({id: one for id, one in zip(ids, documents, strict=True) if id in present})

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> None:
        """Remove documents by ids, or as Chroma's ``where``, ``where_document`` and ``limit`` say."""
        gone = [ids] if isinstance(ids, str) else ids or None
        if kwargs and self._warms:
            # With a limit, or by a store's own class, others may go than those that Chroma finds.
            exact = "limit" not in kwargs and super(BlendChroma, type(self)).delete is Chroma.delete
            gone = Chroma.get(self, ids, include=[], **kwargs)["ids"] if exact else None
        super().delete(ids, **kwargs)
        if gone is None:
            self._forget_missing()
        else:
            self._forget(gone)

    def delete_collection(self) -> None:
        """Remove the collection, and all of its KV."""
        kv = self._collection_of_kv() if self._warms else None  # named before it is gone
        super().delete_collection()
        if kv is not None:
            kv.clear()

    def _kv_name(self) -> str:
        settings, client = self._client.get_settings(), self._client
        if (settings.is_persistent or settings.chroma_server_host) and self.llm and self.llm.base_url:
            return f"chroma/{self._collection.id}"  # clients on other machines may have the same path
        if settings.chroma_server_host:
            place = f"{settings.chroma_server_host}:{settings.chroma_server_http_port}"
        elif settings.is_persistent:
            place = str(Path(settings.persist_directory).resolve())
        else:  # in memory: stores of one name share a collection, until it is deleted
            return Collection.volatile(f"chroma/{self._collection.id}")
        return f"chroma/{place}/{client.tenant}/{client.database}/{self._collection_name}"

    def _documents(self) -> Mapping[str, Document]:
        documents: dict[str, Document] = {}
        ids = self.get(include=[])["ids"]  # at first: deletions shift what is counted
        for begin in range(0, len(ids), PAGE):
            page = self.get(ids[begin : begin + PAGE], include=["documents", "metadatas"])
            for id, text, metadata in zip(page["ids"], page["documents"], page["metadatas"], strict=True):
                if text and not _PICTURE.fullmatch(text):
                    documents[id] = Document(text, metadata=metadata or {})
        return documents

    def _present(self, ids: Iterable[str]) -> set[str]:
        wanted = list(ids)
        parts = (wanted[at : at + PAGE] for at in range(0, len(wanted), PAGE))
        return {id for part in parts for id in Chroma.get(self, part, include=[])["ids"]}
