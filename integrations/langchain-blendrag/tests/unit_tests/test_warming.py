"""warm() and BlendChroma: what holds for every store, and for those that are not Chroma."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from langchain_chroma import Chroma
from langchain_community.docstore.in_memory import InMemoryDocstore
from langchain_community.vectorstores import FAISS
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from blendrag.errors import ConfigError, EngineError
from langchain_blendrag import BlendChroma, ChatBlend, warm
from langchain_rig import Unlisted, awaited

TEXTS = ["The sea is salt.", "Grass is green.", "Snow is cold."]


def faiss_store(embeddings: Any) -> FAISS:
    import faiss

    return FAISS(embeddings, faiss.IndexFlatL2(embeddings.size), InMemoryDocstore(), {})


@pytest.fixture(params=[InMemoryVectorStore, faiss_store], ids=["memory", "faiss"])
def plain(request: pytest.FixtureRequest, embeddings: Any) -> VectorStore:
    return request.param(embeddings)


@pytest.fixture
def store(plain: VectorStore, recorded_llm: ChatBlend) -> Any:
    return warm(plain, recorded_llm)


@pytest.fixture(params=[InMemoryVectorStore, faiss_store, None], ids=["memory", "faiss", "chroma"])
def any_store(
    request: pytest.FixtureRequest, embeddings: Any, recorded_llm: ChatBlend, tmp_path: Path
) -> Any:
    if request.param is None:
        return BlendChroma("things", embeddings, persist_directory=str(tmp_path), llm=recorded_llm)
    return warm(request.param(embeddings), recorded_llm)


def test_object_and_its_type_stay(plain: VectorStore, recorded_llm: ChatBlend, recorder: Any) -> None:
    base = type(plain)
    store = warm(plain, recorded_llm)
    assert store is plain and isinstance(store, base) and type(store) is not base
    assert type(store).delete is not VectorStore.delete
    assert not recorder.starts
    again = warm(store, recorded_llm)
    assert again is store and type(store).__bases__[-1] is base


async def test_every_way_of_adding_warms_documents(any_store: Any, recorder: Any, embeddings: Any) -> None:
    store = any_store
    ways: dict[str, Callable[[list[str]], Any]] = {
        "add_texts": store.add_texts,
        "named": lambda texts: store.add_texts(texts=texts),
        "add_documents": lambda texts: store.add_documents([Document(text) for text in texts]),
        "aadd_texts": lambda texts: store.aadd_texts(texts),
        "aadd_documents": lambda texts: store.aadd_documents(documents=[Document(text) for text in texts]),
        "retriever": lambda texts: store.as_retriever().add_documents([Document(text) for text in texts]),
    }
    if not isinstance(store, InMemoryVectorStore):  # which adds nothing from a generator
        ways["generator"] = lambda texts: store.add_texts(text for text in texts)
    if isinstance(store, FAISS):
        ways["add_embeddings"] = lambda texts: store.add_embeddings(
            zip(texts, embeddings.embed_documents(texts), strict=True)
        )
    added = set()
    for way, add in ways.items():
        await awaited(add([f"{way}: {text}" for text in TEXTS]))
        added |= {f"{way}: {text}" for text in TEXTS}
        assert recorder.kept == added, way
    assert recorder.tokens > 0 and recorder.starts == 1
    assert len(recorder.prefilled) == len(added) and store.sync().unchanged == len(added)


async def test_adding_does_not_block_the_event_loop(
    any_store: Any, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest, threads = recorder.ingest, set[int]()

    def noted(chunks: Any) -> Any:
        threads.add(threading.get_ident())
        return ingest(chunks)

    monkeypatch.setattr(recorder, "ingest", noted)
    await any_store.aadd_documents([Document(TEXTS[0])])
    assert threads and threading.get_ident() not in threads


async def test_half_of_a_surrogate_pair_is_replaced_where_it_comes_in(any_store: Any, recorder: Any) -> None:
    any_store.add_texts(["Note \ud835."])
    await any_store.aadd_documents([Document("Sign \ud835\udc65.")])
    assert recorder.kept == {"Note \ufffd.", "Sign \U0001d465."}
    assert {found.page_content for found in any_store.similarity_search("?", k=2)} == recorder.kept


def test_store_is_copied_and_pickled_as_the_plain_one_is(store: Any, recorder: Any) -> None:
    store.add_texts(TEXTS[:1])
    for other in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        assert type(other) is type(store) and other.similarity_search("?", k=1)
        other.add_texts([f"{TEXTS[1]} {other!r}"])
        assert len(recorder.kept) > 1


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_deleted_documents_lose_their_kv(store: Any, recorder: Any, asynchronous: bool) -> None:
    store.add_texts(TEXTS, ids=["a", "b", "c"])
    if asynchronous:
        await store.adelete(["a", "b"])
    else:
        store.delete(ids=["a", "b"])
    assert recorder.kept == {TEXTS[2]}


def test_store_that_takes_over_another_ones_documents_warms_them(
    embeddings: Any, recorded_llm: Any, recorder: Any
) -> None:
    store, other = warm(faiss_store(embeddings), recorded_llm), faiss_store(embeddings)
    store.add_texts(TEXTS[:1])
    other.add_texts(TEXTS[1:])
    store.merge_from(other)
    assert recorder.kept == set(TEXTS) and recorder.prefilled == TEXTS
    store.delete(list(store.index_to_docstore_id.values())[1:])
    assert recorder.kept == {TEXTS[0]}


def test_refused_deletion_keeps_kv(embeddings: Any, recorded_llm: Any, recorder: Any) -> None:
    store = warm(faiss_store(embeddings), recorded_llm)
    store.add_texts(TEXTS, ids=["a", "b", "c"])
    for ids in (["a", "unknown"], None):
        with pytest.raises(ValueError):
            store.delete(ids)
    assert recorder.kept == set(TEXTS)


def test_deletion_without_ids_keeps_the_kv_of_what_is_there(
    embeddings: Any, recorded_llm: Any, recorder: Any
) -> None:
    class Emptied(InMemoryVectorStore):
        def delete(self, ids: Any = None, **kwargs: Any) -> None:
            super().delete(list(self.store)[:2] if ids is None else ids)

    store = warm(InMemoryVectorStore(embeddings), recorded_llm)
    store.add_texts(TEXTS)
    store.delete()  # this one removes nothing then
    assert recorder.kept == set(TEXTS)
    store = warm(Emptied(embeddings), recorded_llm)
    store.add_texts([f"emptied: {text}" for text in TEXTS])
    store.delete()
    assert recorder.kept == {*TEXTS, f"emptied: {TEXTS[2]}"}


def test_text_in_place_of_ids_removes_the_kv_of_what_the_store_removes(
    embeddings: Any, recorded_llm: Any, recorder: Any
) -> None:
    store = warm(InMemoryVectorStore(embeddings), recorded_llm)
    store.add_texts(TEXTS, ids=["a", "ab", "c"])
    store.delete("ab")  # which this one takes for "a" and "b"
    assert recorder.kept == set(TEXTS[1:]) == {one["text"] for one in store.store.values()}


SEARCHES: dict[str, Callable[[Any], Any]] = {
    "similarity_search": lambda s: s.similarity_search(TEXTS[0], k=2),
    "with_score": lambda s: s.similarity_search_with_score(TEXTS[0], k=2),
    "with_relevance_scores": lambda s: s.similarity_search_with_relevance_scores(TEXTS[0], k=2),
    "by_vector": lambda s: s.similarity_search_by_vector([0.1] * 6, k=2),
    "mmr": lambda s: s.max_marginal_relevance_search(TEXTS[0], k=2, fetch_k=3),
    "mmr by_vector": lambda s: s.max_marginal_relevance_search_by_vector([0.1] * 6, k=2, fetch_k=3),
    "search": lambda s: s.search(TEXTS[0], "mmr", k=2),
    "retriever": lambda s: s.as_retriever(search_kwargs={"k": 2}).invoke(TEXTS[0]),
    "mmr retriever": lambda s: s.as_retriever(search_type="mmr", search_kwargs={"k": 2}).invoke(TEXTS[0]),
    "asimilarity_search": lambda s: s.asimilarity_search(TEXTS[0], k=2),
    "awith_score": lambda s: s.asimilarity_search_with_score(TEXTS[0], k=2),
    "awith_relevance_scores": lambda s: s.asimilarity_search_with_relevance_scores(TEXTS[0], k=2),
    "aby_vector": lambda s: s.asimilarity_search_by_vector([0.1] * 6, k=2),
    "ammr": lambda s: s.amax_marginal_relevance_search(TEXTS[0], k=2, fetch_k=3),
    "aretriever": lambda s: s.as_retriever(search_kwargs={"k": 2}).ainvoke(TEXTS[0]),
}


@pytest.mark.filterwarnings("ignore:Relevance scores must be")  # random embeddings
@pytest.mark.parametrize("search", SEARCHES)
async def test_search_reads_ahead_what_it_found_and_puts_it_in_the_order_of_the_model(
    any_store: Any, recorder: Any, recorded_llm: Any, search: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "relevance" in search and isinstance(any_store, InMemoryVectorStore):
        with pytest.raises(NotImplementedError):  # as without us: it has no such scores
            await any_store.asimilarity_search_with_relevance_scores(TEXTS[0])
        return
    any_store.add_texts(TEXTS)
    texts: list[list[str]] = []
    for backwards in (False, True):
        if backwards:
            monkeypatch.setattr(type(recorded_llm.chat), "order", lambda self, texts: range(len(texts))[::-1])
        found = await awaited(SEARCHES[search](any_store))
        texts.append([(one[0] if isinstance(one, tuple) else one).page_content for one in found])
    assert len(texts[0]) == 2 and texts[1] == texts[0][::-1]
    assert len(recorder.prefetched) == 2 and recorder.prefetched[0] == texts[0]


def test_calls_by_the_class_and_by_super_are_followed(
    embeddings: Any, recorded_llm: Any, recorder: Any, tmp_path: Path
) -> None:
    class Mine(BlendChroma):
        def best(self, query: str) -> list[Document]:
            return [document for document, _ in super().similarity_search_with_score(query, k=2)]

    store = Mine("things", embeddings, persist_directory=str(tmp_path), llm=recorded_llm)
    store.add_texts(TEXTS)
    assert recorder.prefetched == [[one.page_content for one in store.best(TEXTS[0])]]
    other = warm(InMemoryVectorStore(embeddings), recorded_llm)
    type(other).add_texts(other, ["By the class."])
    assert "By the class." in recorder.kept


def test_methods_of_a_store_stay_its_methods(embeddings: Any, recorded_llm: Any, recorder: Any) -> None:
    class Bound(InMemoryVectorStore):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.upsert = self.add_texts

    store = warm(Bound(embeddings), recorded_llm)
    store.upsert(TEXTS)
    search = warm(InMemoryVectorStore(embeddings), recorded_llm).similarity_search
    copied = copy.deepcopy({"store": search.__self__, "search": search})  # type: ignore[attr-defined]
    assert copied["search"].__self__ is copied["store"]
    assert search == search.__self__.similarity_search  # type: ignore[attr-defined]


def test_stores_keep_the_documents_of_others(recorder: Any, embeddings: Any, recorded_llm: Any) -> None:
    stores = [warm(InMemoryVectorStore(embeddings), recorded_llm) for _ in range(2)]
    for n, store in enumerate(stores):
        store.add_texts([f"text {n}"], ids=["a"])
    stores[0].delete(["a"])
    assert recorder.kept == {"text 1"}


def test_named_store_is_known_when_it_is_loaded_again(
    embeddings: Any, recorded_llm: Any, recorder: Any, tmp_path: Path
) -> None:
    saved = warm(faiss_store(embeddings), recorded_llm, name="handbook")
    saved.add_texts(TEXTS, ids=["a", "b", "c"])
    saved.save_local(str(tmp_path))
    loaded: Any = warm(
        FAISS.load_local(str(tmp_path), embeddings, allow_dangerous_deserialization=True),
        recorded_llm,
        name="handbook",
    )
    loaded.delete(["a"])
    assert recorder.kept == set(TEXTS[1:])
    assert loaded.sync().unchanged == 2


def test_stores_that_a_warm_class_makes_keep_their_kv_apart(
    store: Any, embeddings: Any, recorded_llm: Any, recorder: Any
) -> None:
    one, other = (type(store).from_texts([text], embeddings) for text in TEXTS[:2])
    one.llm = other.llm = recorded_llm
    assert one.sync().added == other.sync().added == 1
    assert recorder.kept == set(TEXTS[:2])


def test_store_that_was_full_before_is_warmed_by_sync(
    plain: VectorStore, recorded_llm: Any, recorder: Any
) -> None:
    plain.add_texts(TEXTS)
    store: Any = warm(plain, recorded_llm)
    assert not recorder.kept
    assert store.sync().added == 3 and recorder.kept == set(TEXTS)


def test_documents_stored_without_kv_are_mentioned(any_store: Any, recorder: Any) -> None:
    recorder.fails = True
    with pytest.raises(EngineError) as failed:
        any_store.add_texts(TEXTS)
    assert "stored" in failed.value.__notes__[0] and "sync()" in failed.value.__notes__[0]
    assert len(any_store.similarity_search("sea")) == 3 and not recorder.kept
    recorder.fails = False
    report = any_store.sync()
    assert recorder.kept == set(TEXTS) and report.chunks == report.unchanged == 3


def test_least_of_stores_works(recorded_llm: Any, recorder: Any) -> None:
    store: Any = warm(Unlisted(), recorded_llm)
    store.add_texts(TEXTS, ids=["0", "1", "2"])
    with pytest.raises(ConfigError, match="Unlisted cannot list"):
        store.sync()
    store.delete(["0"])
    assert recorder.kept == set(TEXTS[1:])
    assert store.delete(["unknown", "1"]) is False  # and removed nothing
    assert recorder.kept == set(TEXTS[1:])
    assert store.similarity_search("grass", k=1) and recorder.prefetched == [[TEXTS[1]]]
    report = store.ingest([Document("Ice melts.")], show_progress=False)
    assert report.added == 1 and "Ice melts." in recorder.kept


def test_what_is_no_store_and_a_model_that_keeps_no_kv_are_named(embeddings: Any) -> None:
    other: Any = FakeListChatModel(responses=[])
    with pytest.raises(ConfigError, match="takes a vector store"):
        warm(InMemoryVectorStore, None)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"has to be a ChatBlend, .* not a FakeListChatModel"):
        warm(InMemoryVectorStore(embeddings), other)
    with pytest.raises(ConfigError, match=r"has to be a ChatBlend, .* not a FakeListChatModel"):
        BlendChroma("things", embeddings, llm=other)


def test_chroma_is_warmed_as_blend_chroma_is(
    embeddings: Any, recorded_llm: Any, recorder: Any, tmp_path: Path
) -> None:
    class Special(Chroma):
        def add_texts(self, texts: Iterable[str], *args: Any, **kwargs: Any) -> list[str]:
            return super().add_texts([text.upper() for text in texts], *args, **kwargs)

        def delete(self, ids: list[str] | None = None, oldest: bool = False, **kwargs: Any) -> None:
            super().delete(self.get()["ids"][:1] if oldest else ids, **kwargs)

    for base in (Chroma, Special):
        store = warm(base(base.__name__, embeddings, persist_directory=str(tmp_path)), recorded_llm)
        assert isinstance(store, BlendChroma) and isinstance(store, base)
        store.add_texts(TEXTS, [{"n": n} for n in range(3)])
        store.delete(where={"n": 0})
        store.sync()
        assert set(store.get()["documents"]) <= recorder.kept and len(recorder.deleted) == 1
        recorder.deleted.clear()
    store.delete(oldest=True)
    assert len(recorder.deleted) == 1 and set(store.get()["documents"]) <= recorder.kept


class OfAnn(Chroma):
    """A store whose searches find the documents of one user only."""

    def similarity_search(self, *args: Any, **kwargs: Any) -> list[Document]:
        return super().similarity_search(*args, **{**kwargs, "filter": {"user": "ann"}})

    def max_marginal_relevance_search(self, *args: Any, **kwargs: Any) -> list[Document]:
        return super().max_marginal_relevance_search(*args, **{**kwargs, "filter": {"user": "ann"}})


def of_ann(search: Any) -> Any:
    return lambda *args, **kwargs: search(*args, **{**kwargs, "filter": {"user": "ann"}})


@pytest.mark.parametrize("way", ["warm", "class", "subclass", "set later"])
async def test_search_of_a_stores_own_class_stays_its_own(
    embeddings: Any, recorded_llm: Any, recorder: Any, tmp_path: Path, way: str
) -> None:
    both: Any = type("Both", (BlendChroma, OfAnn), {})
    plain: Any = type("Plain", (BlendChroma,), {})
    before: Any = type("Before", (plain,), {})
    for search in ("similarity_search", "max_marginal_relevance_search"):
        setattr(plain, search, of_ann(getattr(plain, search)))
    kind: Any = {
        "warm": OfAnn, "class": both, "subclass": type("Heir", (both,), {}),
        "set later": type("After", (before,), {}),
    }[way]  # fmt: skip
    store = warm(kind("things", embeddings, persist_directory=str(tmp_path)), recorded_llm)
    store.add_texts(TEXTS, [{"user": user} for user in ("ann", "bob", "bob")])
    retrievers = [store.as_retriever(), store.as_retriever(search_type="mmr")]
    found = [store.similarity_search("?"), *(retriever.invoke("?") for retriever in retrievers)]
    found += [await retriever.ainvoke("?") for retriever in retrievers]
    assert [[one.page_content for one in documents] for documents in found] == [TEXTS[:1]] * 5
    assert recorder.prefetched == [TEXTS[:1]] * 5
