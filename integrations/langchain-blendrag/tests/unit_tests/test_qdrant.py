"""A store that gives ids back with dashes, and documents without any."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_qdrant import QdrantVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter
from qdrant_client import QdrantClient
from qdrant_client.models import Distance, VectorParams

from langchain_blendrag import warm
from langchain_rig import Unlisted, awaited

TEXTS = ["The sea is salt.", "Grass is green.", "Snow is cold."]
LINES = RecursiveCharacterTextSplitter(separators=["\n"], chunk_size=1, chunk_overlap=0, keep_separator=False)


@pytest.fixture
def store(embeddings: Any, recorded_llm: Any) -> Any:
    client = QdrantClient(":memory:")
    client.create_collection("kb", VectorParams(size=embeddings.size, distance=Distance.COSINE))
    return warm(QdrantVectorStore(client, "kb", embeddings), recorded_llm, "kb")


def test_second_ingest_finds_what_the_first_stored(store: Any, recorder: Any, embeddings: Any) -> None:
    document = Document("\n".join(TEXTS), metadata={"source": "a"})
    for added in (3, 0):
        report = store.ingest([document], show_progress=False, text_splitter=LINES)
        assert (report.added, report.skipped) == (added, 3 - added)
    assert [text for text in embeddings.embedded if text in TEXTS] == TEXTS and recorder.kept == set(TEXTS)


@pytest.mark.parametrize("given", [None, "dashes", "none", "capitals", "numbers"])
def test_document_that_was_found_is_deleted_with_its_kv(store: Any, recorder: Any, given: str | None) -> None:
    uuids = [uuid.uuid4() for _ in TEXTS]
    ids: dict[str | None, list[Any] | None] = {
        None: None,
        "dashes": [str(one) for one in uuids],
        "none": [one.hex for one in uuids],
        "capitals": [str(one).upper() for one in uuids],
        "numbers": [1, 2, 3],
    }
    store.add_texts(TEXTS, ids=ids[given])
    (found,) = store.similarity_search(TEXTS[1], k=1)
    store.delete([found.metadata["_id"]])
    assert recorder.kept == set(TEXTS) - {found.page_content}


def test_document_is_deleted_by_the_id_that_was_returned(store: Any, recorder: Any) -> None:
    ids = store.add_texts(TEXTS)
    store.delete(ids[:1])
    store.delete([str(uuid.UUID(ids[1]))])
    assert recorder.kept == {TEXTS[2]}


class Everything(Unlisted):
    """Has the ways of adding and removing that LangChain's interface has not, and no ``get_by_ids``."""

    async def aadd_embeddings(
        self, texts: list[str], embeddings: list[list[float]], ids: list[str] | None = None
    ) -> list[str]:  # as PGVector
        return self.add_texts(texts, ids=ids)

    def upsert(self, ids: list[str] | None = None, documents: list[Document] | None = None) -> None:
        self.add_texts([one.page_content for one in documents or ()], ids=ids)  # as Milvus

    def delete(self, ids: Any = None, delete_all: bool | None = None, **_: Any) -> Any:  # as Pinecone
        for id in list(self.texts) if delete_all else ids:
            self.texts.pop(id)

    def delete_collection(self) -> None:
        self.texts.clear()

    async def aclear(self) -> None:
        self.texts.clear()

    def delete_index(self, index_name: str | None = None) -> bool:  # as OpenSearch
        if index_name is None:
            self.texts.clear()
        return True

    def delete_by_document_id(self, document_id: str) -> bool:  # as Astra
        return self.texts.pop(document_id, None) is not None


async def test_every_way_of_adding_and_removing_is_followed(recorded_llm: Any, recorder: Any) -> None:
    store: Any = warm(Everything(), recorded_llm)
    ids = ["a", "b", "c"]

    for add in (
        lambda: store.upsert(ids, [Document(text) for text in TEXTS]),
        lambda: store.upsert(documents=[Document(text) for text in TEXTS], ids=ids),
        lambda: store.aadd_embeddings(TEXTS, [[0.1]] * 3, ids),
    ):
        await awaited(add())
        assert recorder.kept == set(TEXTS)
        assert not store.delete_by_document_id("unknown") and store.delete_index("of others")
        assert recorder.kept == set(TEXTS)
        store.delete_by_document_id("b")
        assert recorder.kept == {TEXTS[0], TEXTS[2]}
        store.delete(["a", "c"])
        assert not recorder.kept
    for remove in (
        store.delete_collection,
        store.aclear,
        store.delete_index,
        lambda: store.delete(delete_all=True),
    ):
        store.add_texts(TEXTS)
        await awaited(remove())
        assert not recorder.kept
