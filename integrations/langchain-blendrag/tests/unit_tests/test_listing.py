"""sync() of warmed stores that other packages bring, as they run here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from blendrag import vectorstores
from langchain_blendrag import ChatBlend, warm
from vector_stores import postgres_server

TEXTS = [f"Text {n}." for n in range(300)]  # of two pages
IDS = [f"00000000-0000-0000-0000-{n:012}" for n in range(300)]
SOURCES = [{"source": "page"}] * 300


def qdrant(embeddings: Embeddings, folder: Path, stack: ExitStack) -> VectorStore:
    from langchain_qdrant import QdrantVectorStore
    from qdrant_client import QdrantClient, models

    client = QdrantClient(":memory:")
    vectors = models.VectorParams(size=6, distance=models.Distance.COSINE)
    client.create_collection("kb", vectors_config=vectors)
    return QdrantVectorStore(client, "kb", embeddings, content_payload_key="body")


def lance(embeddings: Embeddings, folder: Path, stack: ExitStack) -> VectorStore:
    lancedb = pytest.importorskip("lancedb")
    from langchain_community.vectorstores import LanceDB

    return LanceDB(lancedb.connect(folder), embeddings, table_name="kb", id_key="name", text_key="body")


def milvus(embeddings: Embeddings, folder: Path, stack: ExitStack) -> VectorStore:
    pytest.importorskip("milvus_lite")
    made = pytest.importorskip("langchain_milvus").Milvus
    where = {"uri": str(folder / "kb.db")}
    index = {"index_type": "FLAT", "metric_type": "L2"}
    store: VectorStore = made(embeddings, "kb", connection_args=where, index_params=index, text_field="body")
    return store


def pgvector(embeddings: Embeddings, folder: Path, stack: ExitStack) -> VectorStore:
    made = pytest.importorskip("langchain_postgres").PGVector
    url = postgres_server(folder, stack).replace("postgresql://", "postgresql+psycopg://")
    store: VectorStore = made(embeddings, connection=url, collection_name="kb")
    return store


KINDS: dict[str, Callable[[Embeddings, Path, ExitStack], VectorStore]] = {
    one.__name__: one for one in (qdrant, lance, milvus, pgvector)
}


@pytest.fixture(params=KINDS)
def plain(request: pytest.FixtureRequest, embeddings: Any, tmp_path: Path) -> Iterator[VectorStore]:
    with ExitStack() as stack:
        yield KINDS[request.param](embeddings, tmp_path, stack)


def test_store_that_was_full_before_is_warmed_by_sync(
    plain: VectorStore, recorded_llm: ChatBlend, recorder: Any
) -> None:
    plain.add_texts(TEXTS, SOURCES, ids=IDS)
    store: Any = warm(plain, recorded_llm, name="kb")
    assert not recorder.kept
    assert store.sync(show_progress=False).added == len(TEXTS)
    assert recorder.kept == set(TEXTS)
    assert store.sync(show_progress=False).unchanged == len(TEXTS)


def test_what_is_deleted_is_released(plain: VectorStore, recorded_llm: ChatBlend, recorder: Any) -> None:
    store: Any = warm(plain, recorded_llm, name="kb")
    store.add_texts(TEXTS, SOURCES, ids=IDS)
    assert recorder.kept == set(TEXTS)
    store.delete(ids=IDS[:10])
    assert recorder.kept == set(TEXTS[10:])
    assert store.sync(show_progress=False).removed == 0


def test_store_of_another_program_is_followed_in_this_process(
    embeddings: Any, tmp_path: Path, recorded_llm: ChatBlend, recorder: Any
) -> None:
    store: Any = qdrant(embeddings, tmp_path, ExitStack())
    followed = vectorstores.Qdrant(store.client, "kb")
    kept = recorded_llm.chat.collection("kb")
    store.add_texts(TEXTS, ids=IDS)
    assert vectorstores.sync(followed, kept, text_field="body").added == len(TEXTS)
    store.delete(IDS[:10])
    store.add_texts(["Another."], ids=IDS[10:11])
    report = vectorstores.sync(followed, kept, text_field="body")
    assert (report.chunks, report.changed, report.removed, report.unchanged) == (1, 1, 10, 289)
    assert recorder.kept == {*TEXTS[11:], "Another."}
    assert len(recorder.prefilled) == len(TEXTS) + 1


def test_what_a_filter_deleted_is_released(
    embeddings: Any, tmp_path: Path, recorded_llm: ChatBlend, recorder: Any
) -> None:
    with ExitStack() as stack:
        store: Any = warm(milvus(embeddings, tmp_path, stack), recorded_llm)  # has no get_by_ids
        store.add_texts(TEXTS, SOURCES, ids=IDS)
        store.delete(expr=f'pk < "{IDS[10]}"')
        assert recorder.kept == set(TEXTS[10:])


@pytest.mark.parametrize("kind", [milvus, lance])
def test_second_ingest_adds_nothing(
    kind: Any, embeddings: Any, tmp_path: Path, recorded_llm: ChatBlend, recorder: Any
) -> None:
    """Without get_by_ids; the first addition makes the collection."""
    documents = [Document(text, metadata={"source": "page"}) for text in TEXTS]
    with ExitStack() as stack:
        store: Any = warm(kind(embeddings, tmp_path, stack), recorded_llm)
        store.mode = "append"  # of LanceDB's
        reports = [store.ingest(documents, show_progress=False) for _ in range(2)]
        assert [(report.added, report.skipped) for report in reports] == [(300, 0), (0, 300)]
        assert store.sync(show_progress=False).unchanged == len(TEXTS)
