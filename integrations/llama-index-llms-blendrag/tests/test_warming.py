"""warm(): vector stores other than our own, as they run here."""

from __future__ import annotations

import asyncio
import pickle
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, MockEmbedding, StorageContext, VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.llms import MockLLM
from llama_index.core.schema import BaseNode, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from llama_index.vector_stores.chroma import ChromaVectorStore

from blendrag.errors import ConfigError
from llama_index.llms.blendrag import BlendChromaVectorStore, BlendLLM, WarmKV, warm
from vector_stores import postgres_server

DOCUMENTS = [Document(text="One.", metadata={"page": 1}, id_="first"), Document(text="Two.", id_="second")]
VECTOR = [0.1, 0.2]


def memory(folder: Path, stack: ExitStack) -> BasePydanticVectorStore:
    return SimpleVectorStore()


def chroma(folder: Path, stack: ExitStack) -> BasePydanticVectorStore:
    import chromadb

    return ChromaVectorStore(chromadb.PersistentClient(str(folder)).create_collection("kb-of-nodes"))


def qdrant(folder: Path, stack: ExitStack) -> BasePydanticVectorStore:
    from llama_index.vector_stores.qdrant import QdrantVectorStore
    from qdrant_client import QdrantClient

    return QdrantVectorStore("kb", client=QdrantClient(":memory:"))


def milvus(folder: Path, stack: ExitStack) -> BasePydanticVectorStore:
    pytest.importorskip("milvus_lite")
    made = pytest.importorskip("llama_index.vector_stores.milvus").MilvusVectorStore
    store: BasePydanticVectorStore = made(uri=str(folder / "kb.db"), dim=2, use_async_client=False)
    return store


def postgres(folder: Path, stack: ExitStack) -> BasePydanticVectorStore:
    made = pytest.importorskip("llama_index.vector_stores.postgres").PGVectorStore
    url = postgres_server(folder, stack)
    store: BasePydanticVectorStore = made(
        connection_string=url.replace("postgresql:", "postgresql+psycopg2:"),
        async_connection_string=url.replace("postgresql:", "postgresql+asyncpg:"),
        table_name="kb",
        embed_dim=2,
    )
    return store


KINDS: dict[str, Callable[[Path, ExitStack], BasePydanticVectorStore]] = {
    one.__name__: one for one in (memory, chroma, qdrant, milvus, postgres)
}


@pytest.fixture(params=KINDS)
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BasePydanticVectorStore]:
    with ExitStack() as stack:
        yield KINDS[request.param](tmp_path, stack)


def kept(llm: BlendLLM) -> set[str]:
    return {entry.text for entry in llm._chat.library.catalogue.entries() if entry.state == "ready"}


def node(text: str, document: str | None = None, **metadata: Any) -> TextNode:
    made = TextNode(id_=str(uuid.uuid4()), text=text, metadata=metadata, embedding=VECTOR)
    if document is not None:
        made.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=document)
    return made


NODES = [("One.", "a"), ("Two.", "a"), ("Three.", "b")]


def nodes() -> list[BaseNode]:
    return [node(text, document, page=text[0]) for text, document in NODES]


def texts(*ones: str) -> set[str]:
    return {form for one in ones for form in (one, f"page: {one[0]}\n\n{one}")}


def test_object_and_its_type_stay(plain: BasePydanticVectorStore, llm: BlendLLM, scripted: Any) -> None:
    base = type(plain)
    store = warm(plain, llm)
    assert store is plain and isinstance(store, base) and isinstance(store, WarmKV)
    assert warm(store, llm) is store and type(store).__bases__ == (WarmKV, base)
    assert scripted.starts == 0
    assert "llm" not in store.to_dict()


def test_what_is_added_is_warm_and_what_is_deleted_is_not(
    plain: BasePydanticVectorStore, llm: BlendLLM
) -> None:
    store: Any = warm(plain, llm, "kb")
    added = nodes()
    store.add(added)
    assert kept(llm) == texts("One.", "Two.", "Three.")
    store.delete("b")
    assert kept(llm) == texts("One.", "Two.")
    store.delete_nodes([added[0].node_id])
    assert kept(llm) == texts("Two.")


async def test_asynchronous_methods_do_the_same(plain: BasePydanticVectorStore, llm: BlendLLM) -> None:
    store: Any = warm(plain, llm)
    if type(plain).__bases__[-1].__name__ in ("QdrantVectorStore", "PGVectorStore", "MilvusVectorStore"):
        pytest.skip("an asynchronous client is a connection of its own, which this store is not given here")
    added = nodes()
    await store.async_add(added)
    assert kept(llm) == texts("One.", "Two.", "Three.")
    await store.adelete("b")
    await store.adelete_nodes([added[0].node_id])
    assert kept(llm) == texts("Two.")


def test_store_that_was_full_before_is_warmed_by_sync(plain: BasePydanticVectorStore, llm: BlendLLM) -> None:
    added = nodes()
    plain.add(added)
    store: Any = warm(plain, llm, "kb")
    assert not kept(llm)
    listed: Sequence[BaseNode] | None = added if isinstance(store, SimpleVectorStore) else None
    assert store.sync(listed, show_progress=False).added == 3
    assert kept(llm) == texts("One.", "Two.", "Three.")
    assert store.sync(listed, show_progress=False).unchanged == 3
    store.delete("a")  # as what it added itself
    assert kept(llm) == texts("Three.")


@pytest.mark.parametrize("document", ["a", "b"])
def test_node_added_again_is_kept_as_the_store_has_it_whichever_document_is_deleted(
    plain: BasePydanticVectorStore, llm: BlendLLM, document: str
) -> None:
    store: Any = warm(plain, llm)
    first, again = node("One.", "a"), node("Two.", "b")
    again.id_ = first.id_
    store.add([first])
    store.add([again])
    store.delete(document)
    found = store.query(VectorStoreQuery(query_embedding=VECTOR, similarity_top_k=2))
    shown = found.nodes if found.nodes is not None else [again] * len(found.ids)
    assert kept(llm) == {one.get_content() for one in shown}


def test_what_is_deleted_without_naming_it_is_released(llm: BlendLLM) -> None:
    store: Any = warm(SimpleVectorStore(), llm)
    store.add(nodes())
    store.delete_nodes([])
    assert kept(llm) == texts("One.", "Two.", "Three.")
    store.delete_nodes()
    assert not store.data.embedding_dict and not kept(llm)


def test_what_filters_deleted_is_released(plain: BasePydanticVectorStore, llm: BlendLLM) -> None:
    if isinstance(plain, ChromaVectorStore):
        pytest.skip("Chroma's class in LlamaIndex deletes nothing by filters alone")
    store: Any = warm(plain, llm)
    store.add(nodes())
    store.delete_nodes(filters=MetadataFilters(filters=[MetadataFilter(key="page", value="T")]))
    assert kept(llm) == texts("One.")


def test_cleared_store_keeps_nothing(plain: BasePydanticVectorStore, llm: BlendLLM) -> None:
    store: Any = warm(plain, llm)
    store.add(nodes())
    try:
        store.clear()
    except NotImplementedError:
        pytest.skip("this store's class has no clear()")
    assert not kept(llm)


def test_query_reads_ahead_what_it_found(
    plain: BasePydanticVectorStore, llm: BlendLLM, scripted: Any
) -> None:
    store: Any = warm(plain, llm)
    store.add(nodes())
    scripted.prefetched.clear()
    result = store.query(VectorStoreQuery(query_embedding=VECTOR, similarity_top_k=2))
    assert len(result.ids) == 2
    if result.nodes:
        assert len(set(scripted.prefetched)) == 4


def test_index_in_memory_is_warmed_with_every_insertion_and_deletion(llm: BlendLLM) -> None:
    context = StorageContext.from_defaults(vector_store=warm(SimpleVectorStore(), llm))
    index = VectorStoreIndex.from_documents(
        DOCUMENTS, storage_context=context, embed_model=MockEmbedding(embed_dim=2)
    )
    index.insert(Document(text="Three."))
    index.insert_nodes([TextNode(text="Four.")])
    assert kept(llm) == {"page: 1\n\nOne.", "One.", "Two.", "Three.", "Four."}
    index.delete_ref_doc("first")
    assert kept(llm) == {"Two.", "Three.", "Four."}


def test_pipeline_with_workers_warms_in_this_process(llm: BlendLLM) -> None:
    store = warm(SimpleVectorStore(), llm)
    pipeline = IngestionPipeline(transformations=[MockEmbedding(embed_dim=2)], vector_store=store)
    pipeline.run(documents=DOCUMENTS, num_workers=2)
    assert kept(llm) == {"page: 1\n\nOne.", "One.", "Two."}


def test_same_texts_again_compute_nothing(llm: BlendLLM, scripted: Any) -> None:
    store = warm(SimpleVectorStore(), llm)
    for _ in range(2):
        store.add([TextNode(text="One.", id_="x", embedding=VECTOR)])
    asyncio.run(store.async_add([TextNode(text="One.", id_="x", embedding=VECTOR)]))
    assert len(scripted.prefilled) == 1


def test_store_in_memory_is_pickled_as_the_plain_one_is(llm: BlendLLM) -> None:
    store: Any = warm(SimpleVectorStore(), llm)
    store.add([node("One.")])
    other = pickle.loads(pickle.dumps(store))
    assert type(other) is type(store) and other.data == store.data
    other.add([node("Two.")])
    assert kept(llm) == {"One.", "Two."}


def test_two_stores_do_not_forget_each_others_nodes(llm: BlendLLM) -> None:
    one, two = warm(SimpleVectorStore(), llm, "one"), warm(SimpleVectorStore(), llm, "two")
    one.add([node("One.")])
    two.add([node("Two.")])
    assert isinstance(one, WarmKV)
    one.sync([])
    assert kept(llm) == {"Two."}


def test_named_store_is_known_when_it_is_loaded_again(llm: BlendLLM, tmp_path: Path) -> None:
    saved = warm(SimpleVectorStore(), llm, "kb")
    saved.add(nodes())
    saved.persist(str(tmp_path / "store.json"))
    loaded = warm(SimpleVectorStore.from_persist_path(str(tmp_path / "store.json")), llm, "kb")
    loaded.delete("a")
    assert kept(llm) == texts("Three.")


def test_store_that_a_warm_ones_class_makes_is_plain_until_it_has_a_model(
    llm: BlendLLM, tmp_path: Path
) -> None:
    saved: Any = warm(SimpleVectorStore(), llm)
    saved.persist(str(tmp_path / "store.json"))
    loaded, other = (saved.from_persist_path(str(tmp_path / "store.json")) for _ in range(2))
    loaded.add([node("One.")])
    assert kept(llm) == set() and loaded.llm is None
    loaded.llm = llm
    loaded.add([node("Two.")])
    assert kept(llm) == {"Two."} and other.llm is None


def test_node_is_forgotten_by_the_id_that_a_store_makes_of_its_own(llm: BlendLLM, tmp_path: Path) -> None:
    store: Any = warm(qdrant(tmp_path, ExitStack()), llm, "kb")
    store.add([TextNode(id_=uuid.uuid4().hex, text=text, embedding=VECTOR) for text in ("One.", "Two.")])
    found = store.query(VectorStoreQuery(query_embedding=VECTOR, similarity_top_k=2)).ids
    store.delete_nodes(found)
    assert not kept(llm)


class Unlisted(BasePydanticVectorStore):
    """The least a vector store can be."""

    stores_text: bool = True
    nodes: list[Any] = []  # noqa: RUF012

    @property
    def client(self) -> None:
        return None

    def add(self, nodes: Sequence[BaseNode], **_: Any) -> list[str]:
        self.nodes += nodes
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **_: Any) -> None:
        self.nodes = [node for node in self.nodes if node.ref_doc_id != ref_doc_id]

    def delete_nodes(self, node_ids: Any = None, filters: Any = None, **_: Any) -> None:
        pass

    def query(self, query: VectorStoreQuery, **_: Any) -> VectorStoreQueryResult:
        return VectorStoreQueryResult(nodes=self.nodes[: query.similarity_top_k])


async def test_any_iterable_of_nodes_is_kept(llm: BlendLLM, tmp_path: Path) -> None:
    store: Any = warm(chroma(tmp_path, ExitStack()), llm)
    one, two, three, four = (node(text) for text in ("One.", "Two.", "Three.", "Four."))
    store.add(iter([one]))
    await store.async_add(iter([two]))
    store.add({"three": three}.values())
    await store.async_add({"four": four}.values())
    assert store._collection.count() == 4
    assert kept(llm) == {"One.", "Two.", "Three.", "Four."}


async def test_store_has_arguments_of_its_own(llm: BlendLLM) -> None:
    class Own(Unlisted):
        def add(self, nodes: Sequence[BaseNode], ids: Any = (), **_: Any) -> list[str]:
            return [*super().add(nodes), *ids]

        def delete_nodes(self, node_ids: Any = None) -> None:  # type: ignore[override]
            pass

    store: Any = warm(Own(), llm)
    one, two, three = nodes()
    assert store.add([one, two, three], ids=["x"])[-1] == "x"
    store.delete_nodes([one.node_id])
    await store.adelete_nodes([two.node_id])
    assert kept(llm) == texts("Three.")


async def test_adding_does_not_block_the_event_loop(llm: BlendLLM, threads: set[int]) -> None:
    await warm(SimpleVectorStore(), llm).async_add(nodes())
    assert threads and threading.get_ident() not in threads


def test_least_of_stores_works(llm: BlendLLM, caplog: pytest.LogCaptureFixture) -> None:
    store: Any = warm(Unlisted(), llm)
    store.add(nodes())
    with pytest.raises(ConfigError, match=r"Unlisted cannot list its nodes: call sync\(nodes\)"):
        store.sync()
    store.delete_nodes(filters=MetadataFilters(filters=[]))
    assert "Unlisted cannot tell what it removed" in caplog.text
    assert kept(llm) == texts("One.", "Two.", "Three.")
    store.delete("a")
    assert kept(llm) == texts("Three.")
    assert store.sync(store.nodes, show_progress=False).unchanged == 1


def test_our_own_store_is_given_the_model(llm: BlendLLM, tmp_path: Path) -> None:
    import chromadb

    ours = BlendChromaVectorStore(chromadb.PersistentClient(str(tmp_path)).create_collection("kb-of-nodes"))
    assert warm(ours, llm) is ours and type(ours) is BlendChromaVectorStore
    ours.add(nodes())
    assert kept(llm) == texts("One.", "Two.", "Three.")


def test_store_without_a_model_is_as_it_was(llm: BlendLLM) -> None:
    store: Any = warm(Unlisted(), None, "kb")
    store.add(nodes())
    with pytest.raises(ConfigError, match="give the vector store an llm"):
        store.sync()
    store.llm = llm
    assert store.sync(store.nodes, show_progress=False).added == 3


def test_nodes_stored_without_kv_are_mentioned(llm: BlendLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, *_: Any, **__: Any) -> None:
        raise ConfigError("no engine")

    store: Any = warm(SimpleVectorStore(), llm)
    with monkeypatch.context() as patch, pytest.raises(ConfigError) as failed:
        patch.setattr("blendrag.serving.collection.Collection._keep", fails)
        store.add(nodes())
    assert "sync()" in failed.value.__notes__[0] and len(store.data.embedding_dict) == 3


def test_mixin_alone_says_what_to_call() -> None:
    with pytest.raises(ConfigError, match=r"warm\(vector_store, llm\)"):
        WarmKV(llm=None)  # type: ignore[call-arg]


def test_what_is_no_store_and_a_model_that_keeps_no_kv_are_named() -> None:
    import chromadb

    other: Any = MockLLM()
    with pytest.raises(ConfigError, match="takes a vector store"):
        warm(SimpleVectorStore, None)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"has to be a BlendLLM, .* not a MockLLM"):
        warm(SimpleVectorStore(), other)
    with pytest.raises(ConfigError, match=r"has to be a BlendLLM, .* not a MockLLM"):
        BlendChromaVectorStore(chromadb.EphemeralClient().create_collection("of-no-llm"), llm=other)
