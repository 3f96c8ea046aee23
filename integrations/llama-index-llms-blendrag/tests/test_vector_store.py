"""The KV store follows the collection, whichever way LlamaIndex changes it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import chromadb
import pytest
from llama_index.core import Document, MockEmbedding, StorageContext, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, MetadataMode, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters, VectorStoreQuery
from llama_index.vector_stores.chroma import ChromaVectorStore

from blendrag.errors import ConfigError, EngineError, StoreFullError
from blendrag.serving import owners
from blendrag.serving.lease import Lease
from blendrag.serving.owners import document_of
from llama_index.llms.blendrag import BlendChromaVectorStore, BlendLLM
from stores import keys_of

EMBED = MockEmbedding(embed_dim=2)


@pytest.fixture
def chroma(tmp_path: Path) -> Any:
    return chromadb.PersistentClient(str(tmp_path / "chroma")).create_collection("nodes")


@pytest.fixture
def store(chroma: Any, llm: BlendLLM) -> BlendChromaVectorStore:
    return BlendChromaVectorStore(chroma_collection=chroma, llm=llm)


@pytest.fixture
def index(store: BlendChromaVectorStore) -> Iterator[VectorStoreIndex]:
    context = StorageContext.from_defaults(vector_store=store)
    yield VectorStoreIndex([], storage_context=context, embed_model=EMBED, store_nodes_override=True)


def node(text: str, **metadata: Any) -> TextNode:
    return TextNode(text=text, metadata=metadata, embedding=[0.1, 0.2])


def document(text: str, name: str, **metadata: Any) -> Document:
    return Document(text=text, doc_id=name, metadata=metadata)


def kept(llm: BlendLLM) -> set[str]:
    """All texts of which the KV is there."""
    entries = llm._chat.library.catalogue.entries()
    assert all(entry.state == "ready" for entry in entries)
    return {entry.text for entry in entries}


def in_step(store: BlendChromaVectorStore) -> bool:
    """Whether the KV store's documents are the collection's nodes."""
    assert store.llm is not None
    owners = store.llm._chat.library.catalogue.owners()
    return {document_of(owner) for owner in owners} == set(store.client.get(include=[])["ids"])


def test_text_is_kept_as_the_model_sees_it_and_bare(store: BlendChromaVectorStore, llm: BlendLLM) -> None:
    one = node("  Warranty: eight years.\n", file_name="d1.md", page=3)
    store.add([one])
    seen = one.get_content(metadata_mode=MetadataMode.LLM).strip()
    assert seen.startswith("file_name: d1.md\npage: 3\n\n")
    assert kept(llm) == {seen, "Warranty: eight years."}


def test_bare_text_can_be_left_out(chroma: Any, llm: BlendLLM) -> None:
    BlendChromaVectorStore(chroma_collection=chroma, llm=llm, bare_text=False).add([node("Text.", page=3)])
    assert kept(llm) == {"page: 3\n\nText."}


def test_insert_update_and_delete_of_documents_leave_no_kv_behind(
    index: VectorStoreIndex, store: BlendChromaVectorStore, llm: BlendLLM
) -> None:
    index.insert(document("One.", "a"))
    index.insert(document("Two.", "b"))
    assert kept(llm) == {"One.", "Two."}
    index.update_ref_doc(document("One, changed.", "a"))
    assert kept(llm) == {"One, changed.", "Two."}
    index.delete_ref_doc("b", delete_from_docstore=True)
    assert kept(llm) == {"One, changed."}
    assert in_step(store)


def test_inserted_and_deleted_nodes_are_followed(
    index: VectorStoreIndex, store: BlendChromaVectorStore, llm: BlendLLM
) -> None:
    nodes: list[BaseNode] = [node("One."), node("Two."), node("Three.")]
    index.insert_nodes(nodes)
    index.delete_nodes([nodes[0].node_id])
    assert kept(llm) == {"Two.", "Three."}
    store.clear()
    assert kept(llm) == set()
    store.clear()  # nothing there: no error


def test_store_of_a_collection_takes_what_the_class_does(chroma: Any, llm: BlendLLM) -> None:
    store = BlendChromaVectorStore.from_collection(chroma, llm=llm, bare_text=False)
    assert (store.client, store.llm, store.bare_text) == (chroma, llm, False)
    assert BlendChromaVectorStore.from_collection(chroma).llm is None
    with pytest.raises(ConfigError, match="a collection of Chroma's, not 'kb'"):
        BlendChromaVectorStore.from_collection("kb")


def test_nodes_deleted_by_filter_lose_their_kv(store: BlendChromaVectorStore, llm: BlendLLM) -> None:
    nodes = [node("One.", team="a"), node("Two.", team="b"), node("Three.", team="a")]
    store.add(nodes)
    team_a = MetadataFilters(filters=[MetadataFilter(key="team", value="a")])
    store.delete_nodes([nodes[0].node_id, nodes[1].node_id], team_a)
    assert {"Two.", "Three."} <= kept(llm)
    assert in_step(store)
    store.delete_nodes([], team_a)
    assert store.client.count() == len(nodes) - 1
    store.delete_nodes(filters=team_a)
    assert kept(llm) == {"team: b\n\nTwo.", "Two."}
    assert in_step(store)


def test_text_of_two_nodes_stays_until_both_are_gone(store: BlendChromaVectorStore, llm: BlendLLM) -> None:
    one, two = node("Same."), node("Same.")
    store.add([one, two])
    store.delete_nodes([one.node_id])
    assert kept(llm) == {"Same."}
    store.delete_nodes([two.node_id])
    assert kept(llm) == set()


def test_metadata_that_the_model_does_not_see_recomputes_nothing(
    index: VectorStoreIndex, llm: BlendLLM, scripted: Any
) -> None:
    hidden = {"excluded_llm_metadata_keys": ["checked"]}
    index.insert(Document(text="One.", doc_id="a", metadata={"page": 1, "checked": "no"}, **hidden))
    before = list(scripted.prefilled)
    # Kept by a second document, as the first is deleted before it is added again.
    index.insert(Document(text="One.", doc_id="b", metadata={"page": 1, "checked": "no"}, **hidden))
    index.update_ref_doc(Document(text="One.", doc_id="a", metadata={"page": 1, "checked": "yes"}, **hidden))
    assert scripted.prefilled == before
    assert kept(llm) == {"page: 1\n\nOne.", "One."}


def pipeline(store: BlendChromaVectorStore, strategy: DocstoreStrategy) -> IngestionPipeline:
    return IngestionPipeline(
        transformations=[SentenceSplitter(chunk_size=64, chunk_overlap=0), EMBED],
        vector_store=store,
        docstore=SimpleDocumentStore(),
        docstore_strategy=strategy,
    )


def test_pipeline_upserts_replace_the_kv_of_a_changed_document(
    store: BlendChromaVectorStore, llm: BlendLLM, scripted: Any
) -> None:
    ingest = pipeline(store, DocstoreStrategy.UPSERTS)
    ingest.run(documents=[document("One.", "a"), document("Two.", "b")])
    computed = len(scripted.prefilled)
    ingest.run(documents=[document("One.", "a"), document("Two, changed.", "b")])
    assert kept(llm) == {"One.", "Two, changed."}
    assert len(scripted.prefilled) == computed + 1
    assert in_step(store)


async def test_async_pipeline_with_deletes_forgets_missing_documents(
    store: BlendChromaVectorStore, llm: BlendLLM
) -> None:
    ingest = pipeline(store, DocstoreStrategy.UPSERTS_AND_DELETE)
    await ingest.arun(documents=[document("One.", "a"), document("Two.", "b")])
    await ingest.arun(documents=[document("One.", "a")])
    assert kept(llm) == {"One."}
    assert in_step(store)


def test_more_nodes_than_chroma_takes_at_once_are_added_and_deleted(
    chroma: Any, store: BlendChromaVectorStore
) -> None:
    nodes = [
        TextNode(
            text=f"Number {number % 50}.", embedding=[0.1, number], relationships={"1": {"node_id": "big"}}
        )
        for number in range(6000)
    ]
    with pytest.raises(Exception, match="max batch size"):  # what this class is better at
        ChromaVectorStore(chroma_collection=chroma).add(nodes)
    assert len(store.add(nodes)) == 6000
    assert chroma.count() == 6000
    assert in_step(store)
    store.delete("big")
    assert chroma.count() == 0
    assert in_step(store)


def test_known_id_keeps_the_text_that_chroma_keeps(store: BlendChromaVectorStore, llm: BlendLLM) -> None:
    store.add([TextNode(id_="n", text="First.", embedding=[0.1, 0.2])])
    store.add([TextNode(id_="n", text="Second.", embedding=[0.1, 0.2])])
    assert store.client.get(ids=["n"])["documents"] == ["First."]
    assert kept(llm) == {"First."}


def test_collection_filled_before_the_llm_came_is_synced(chroma: Any, llm: BlendLLM) -> None:
    store = BlendChromaVectorStore(chroma_collection=chroma)
    nodes = [node("One.", page=1), node("Two.", page=2)]
    store.add(nodes)
    store.llm = llm
    report = store.sync()
    assert (report.added, report.removed, report.changed, report.unchanged) == (2, 0, 0, 0)
    assert kept(llm) == {"page: 1\n\nOne.", "One.", "page: 2\n\nTwo.", "Two."}
    chroma.delete(ids=[nodes[0].node_id])
    report = store.sync()
    assert (report.added, report.removed, report.unchanged) == (0, 1, 1)
    assert in_step(store)


def test_sync_without_an_llm_says_what_is_missing(chroma: Any) -> None:
    with pytest.raises(ConfigError, match="give the vector store an llm"):
        BlendChromaVectorStore(chroma_collection=chroma).sync()


@pytest.mark.parametrize("with_llm", [True, False])
def test_answers_to_queries_are_those_of_the_class_it_extends(
    chroma: Any, llm: BlendLLM, with_llm: bool
) -> None:
    store = BlendChromaVectorStore(chroma_collection=chroma, llm=llm if with_llm else None)
    nodes = [TextNode(text=f"Text {n}.", embedding=[1.0, n]) for n in range(5)]
    assert store.add(nodes) == [one.node_id for one in nodes]
    query = VectorStoreQuery(query_embedding=[1.0, 2.0], similarity_top_k=3)
    theirs = ChromaVectorStore(chroma_collection=chroma).query(query)
    for ours in (store.query(query), asyncio.run(store.aquery(query))):
        assert (ours.ids, ours.similarities, ours.nodes) == (theirs.ids, theirs.similarities, theirs.nodes)


def test_store_without_llm_opens_no_library(chroma: Any, scripted: Any) -> None:
    store = BlendChromaVectorStore(chroma_collection=chroma)
    store.add([node("One.")])
    store.query(VectorStoreQuery(query_embedding=[0.1, 0.2]))
    store.clear()
    assert scripted.starts == 0


def test_query_loads_the_kv_of_what_it_returns(
    store: BlendChromaVectorStore, llm: BlendLLM, scripted: Any
) -> None:
    store.add([TextNode(text=f"Text {n}.", embedding=[1.0, n], metadata={"n": n}) for n in range(5)])
    store.query(VectorStoreQuery(query_embedding=[1.0, 2.0], similarity_top_k=1))
    assert set(scripted.prefetched) == keys_of(llm._chat.library, ["Text 2.", "n: 2\n\nText 2."])


def test_query_starts_no_engine(chroma: Any, llm: BlendLLM, scripted: Any) -> None:
    ChromaVectorStore(chroma_collection=chroma).add([node("One.")])
    store = BlendChromaVectorStore(chroma_collection=chroma, llm=llm)
    llm.close()
    assert store.query(VectorStoreQuery(query_embedding=[0.1, 0.2])).ids
    assert scripted.starts == 0
    assert not Lease._open, "a query opens no library either"


def test_query_leaves_nodes_in_the_order_of_the_model(
    store: BlendChromaVectorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add([TextNode(text=f"Text {n}.", embedding=[1.0, n], metadata={"n": n}) for n in range(3)])
    query = VectorStoreQuery(query_embedding=[1.0, 2.0], similarity_top_k=3)
    as_found = store.query(query)
    monkeypatch.setattr(BlendLLM, "order", lambda self, texts: range(len(list(texts)))[::-1])
    ordered = store.query(query)
    assert [one.text for one in ordered.nodes or ()] == [one.text for one in as_found.nodes or ()][::-1]
    assert ordered.ids == (as_found.ids or [])[::-1]
    assert ordered.similarities == (as_found.similarities or [])[::-1]


def test_query_is_answered_when_the_kv_store_cannot_be_used(
    store: BlendChromaVectorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add([node("One.")])

    def broken(self: Any, texts: Any) -> None:
        raise EngineError("it died")

    monkeypatch.setattr(BlendLLM, "prefetch", broken)
    assert store.query(VectorStoreQuery(query_embedding=[0.1, 0.2])).ids


def test_nodes_that_chroma_has_and_no_kv_fits_are_repaired_by_sync(
    store: BlendChromaVectorStore, llm: BlendLLM, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(method: str, *args: Any) -> Any:
        if method == "ingest":
            raise StoreFullError("the disk is full")
        return call(method, *args)

    call = scripted.call
    monkeypatch.setattr(scripted, "call", full)
    with pytest.raises(StoreFullError) as raised:
        store.add([node("One.")])
    assert "sync()" in raised.value.__notes__[0]
    monkeypatch.setattr(scripted, "call", call)
    assert store.sync().chunks == 1
    assert kept(llm) == {"One."}


async def test_adding_does_not_block_the_event_loop(store: BlendChromaVectorStore, threads: set[int]) -> None:
    await store.async_add([node("One.")])
    assert threads and threading.get_ident() not in threads


def test_collections_of_the_same_name_are_told_apart(
    tmp_path: Path, make_llm: Callable[..., BlendLLM]
) -> None:
    llm = make_llm()
    collections = [
        chromadb.PersistentClient(str(tmp_path / name)).create_collection("nodes") for name in ("a", "b")
    ]
    stores = [BlendChromaVectorStore(chroma_collection=one, llm=llm) for one in collections]
    for number, store in enumerate(stores):
        store.add([TextNode(id_="same", text=f"Text {number}.", embedding=[0.1, 0.2])])
    assert kept(llm) == {"Text 0.", "Text 1."}
    stores[0].clear()
    assert kept(llm) == {"Text 1."}


def test_kv_of_a_collection_in_memory_goes_with_its_process(
    make_llm: Callable[..., BlendLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    collection = chromadb.EphemeralClient().create_collection("in-memory")
    BlendChromaVectorStore(chroma_collection=collection, llm=llm).add([node("One.")])
    assert kept(llm) == {"One."}
    llm.close()
    assert kept(llm) == {"One."}, "the collection is still there"
    llm.close()
    monkeypatch.setattr(owners, "_PROCESS", "another")  # as in the next process
    assert kept(llm) == set()


def test_handle_of_the_llm_is_not_serialised(store: BlendChromaVectorStore) -> None:
    assert "llm" not in store.to_dict()
    assert "bare_text" in store.to_dict()


def test_node_stands_behind_the_one_before_it_in_its_document(
    index: VectorStoreIndex, store: BlendChromaVectorStore, llm: BlendLLM
) -> None:
    """With its metadata, and bare; whatever order Chroma tells nodes in."""
    text = " ".join(f"Sentence {n} of the report says that." for n in range(40))
    nodes = SentenceSplitter(chunk_size=40, chunk_overlap=0).get_nodes_from_documents(
        [document(text, "one", file="one.md"), document("Another report.", "two", file="two.md")]
    )
    index.insert_nodes(nodes)
    library = llm._chat.library

    def behind() -> dict[str, str]:
        return {entry.text: library.tokenizer.decode(entry.context) for entry in library.catalogue.entries()}

    for mode in (MetadataMode.LLM, MetadataMode.NONE):
        texts = [one.get_content(metadata_mode=mode).strip() for one in nodes]
        assert len(texts) > 4
        for before, seen in pairwise(texts[:-1]):
            assert behind()[seen].rstrip().endswith(before)
        assert behind()[texts[0]] == behind()[texts[-1]] == ""
    assert store.sync().unchanged == len(nodes)
    store.delete_nodes([nodes[0].node_id])
    assert not any(nodes[0].get_content() in context for context in behind().values())
