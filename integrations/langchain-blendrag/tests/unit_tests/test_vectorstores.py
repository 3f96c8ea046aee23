"""BlendChroma: KV follows the documents, whichever way they come and go."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chromadb
import pytest
from langchain_chroma import Chroma
from langchain_core.documents import Document

from blendrag.errors import ConfigError, EngineError
from langchain_blendrag import BlendChroma, ChatBlend, warm
from langchain_rig import awaited

TEXTS = ["The sea is salt.", "Grass is green.", "Snow is cold."]


@pytest.fixture
def make(embeddings: Any, tmp_path: Path) -> Callable[..., BlendChroma]:
    """Stores on disk, so that every test has its own."""

    def make(collection: str = "things", **options: Any) -> BlendChroma:
        return BlendChroma(collection, embeddings, persist_directory=str(tmp_path / "db"), **options)

    return make


@pytest.fixture
def store(make: Any, recorded_llm: ChatBlend) -> BlendChroma:
    return make(llm=recorded_llm)


def documents(texts: list[str] = TEXTS, **metadata: Any) -> list[Document]:
    return [Document(text, metadata={"n": n, **metadata}) for n, text in enumerate(texts)]


# -- adding -----------------------------------------------------------------------------------------------


async def test_every_way_of_making_a_filled_store_warms_its_documents(
    recorder: Any, embeddings: Any, recorded_llm: ChatBlend
) -> None:
    ways: dict[str, Callable[..., Any]] = {
        "texts": BlendChroma.from_texts,
        "documents": lambda texts, *args, **fresh: BlendChroma.from_documents(
            documents(texts), *args, **fresh
        ),
        "awaited": BlendChroma.afrom_texts,
    }
    client = chromadb.EphemeralClient()
    for way, fill in ways.items():
        texts = [f"{way}: {text}" for text in TEXTS]
        name = f"c{uuid.uuid4().hex}"
        await awaited(fill(texts, embeddings, collection_name=name, client=client, llm=recorded_llm))
        assert set(texts) <= recorder.kept, way
    assert recorder.tokens > 0 and recorder.starts == 1


def test_text_of_two_documents_is_prefilled_once_and_dropped_with_the_last(
    store: BlendChroma, recorder: Any
) -> None:
    store.add_texts([TEXTS[0], f"  {TEXTS[0]}\n"], ids=["a", "b"])
    assert recorder.prefilled == [TEXTS[0]]
    store.delete(["a"])
    assert recorder.kept == {TEXTS[0]} and not recorder.deleted
    store.delete(["b"])
    assert recorder.deleted == [TEXTS[0]]


def test_known_id_with_another_text_has_the_new_text(store: BlendChroma, recorder: Any) -> None:
    store.add_texts([TEXTS[0]], ids=["a"])
    store.add_texts([TEXTS[1]], ids=["a"])
    assert recorder.kept == {TEXTS[1]} and recorder.deleted == [TEXTS[0]]


def test_six_thousand_texts_are_taken(make: Any, embeddings: Any) -> None:
    texts = [f"text {n}" for n in range(6000)]
    plain = Chroma(client=chromadb.EphemeralClient(), collection_name=f"c{uuid.uuid4().hex}",
                   embedding_function=embeddings)  # fmt: skip
    with pytest.raises(Exception, match="max batch size"):
        plain.add_texts(texts)  # when Chroma can, BlendChroma need not batch any more
    embeddings.embedded.clear()
    store = make()
    ids = store.add_texts(texts, [{"n": 1}])
    assert embeddings.embedded == texts
    stored = store.get(ids[0])
    assert stored["documents"] == ["text 0"] and stored["metadatas"] == [{"n": 1}]
    assert len(set(ids)) == store._collection.count() == 6000


def test_metadata_in_a_tuple_is_taken_as_chroma_takes_it(store: BlendChroma) -> None:
    store.add_texts(TEXTS[:2], ({"n": 1},), ids=["a", "b"])  # type: ignore[arg-type]
    assert store.get(["a", "b"])["metadatas"] == [{"n": 1}, None]


def test_failure_in_the_middle_keeps_the_batches_before_it(
    store: BlendChroma, recorder: Any, embeddings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(store._client), "get_max_batch_size", lambda client: 10)
    texts = [f"text {n}" for n in range(25)]
    embeddings.interrupted_at = 3
    with pytest.raises(KeyboardInterrupt):
        store.add_texts(texts)
    assert recorder.kept == set(texts[:20]) == set(store.get()["documents"])


def test_picture_has_no_kv(store: BlendChroma, recorder: Any, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(bytes(range(256)) * 4)
    store.add_texts([TEXTS[0]], ids=["a"])
    assert recorder.kept == {TEXTS[0]}
    embeddings: Any = store._embedding_function
    object.__setattr__(embeddings, "embed_image", lambda uris: embeddings.embed_documents(uris))
    store.add_images([str(picture)], ids=["a"])
    assert recorder.deleted == [TEXTS[0]]
    store.sync()
    assert recorder.prefilled == [TEXTS[0]] and not recorder.kept


# -- changing and removing --------------------------------------------------------------------------------


async def test_every_way_of_removing_removes_kv(store: BlendChroma, recorder: Any) -> None:
    ways: dict[str, Callable[[], Any]] = {
        "delete": lambda: store.delete(["0", "1"]),
        "adelete": lambda: store.adelete(["0", "1"]),
        "where": lambda: store.delete(where={"n": {"$lt": 2}}),
        "where_document": lambda: store.delete(where_document={"$contains": "is "}),
        "ids and where": lambda: store.delete(["0", "1", "2"], where={"n": 1}),
        "limit": lambda: store.delete(where={"n": {"$lt": 3}}, limit=1),
        "reset_collection": store.reset_collection,
    }
    for way, remove in ways.items():
        store.add_documents(documents(), ids=["0", "1", "2"])
        recorder.deleted.clear()
        await awaited(remove())
        left = set(store.get()["documents"])
        assert left < set(TEXTS), way
        assert recorder.kept == left and set(recorder.deleted) == set(TEXTS) - left, way


def test_deleted_collection_loses_its_kv(
    store: BlendChroma, make: Any, recorder: Any, recorded_llm: Any
) -> None:
    other = make("other", llm=recorded_llm)
    store.add_texts(TEXTS[:2], ids=["a", "b"])
    other.add_texts(TEXTS[1:], ids=["a", "b"])
    store.delete_collection()
    assert recorder.kept == set(TEXTS[1:])


def test_update_has_kv_of_what_chroma_took(store: BlendChroma, recorder: Any) -> None:
    store.add_documents(documents(), ids=["0", "1", "2"])
    store.update_document("0", Document("The sea is deep.", metadata={"n": 0}))
    assert recorder.kept == {"The sea is deep.", *TEXTS[1:]}
    store.update_documents(
        ["1", "unknown"],
        [Document("Grass grows.", metadata={"n": 1}), Document("Nobody sees this.", metadata={"n": 9})],
    )
    assert recorder.kept == {"The sea is deep.", "Grass grows.", TEXTS[2]} == set(store.get()["documents"])


def test_refused_deletion_keeps_kv(store: BlendChroma, recorder: Any) -> None:
    store.add_texts(TEXTS)
    with pytest.raises(ValueError):
        store.delete([])
    with pytest.raises(ValueError):
        store.delete()
    assert recorder.kept == set(TEXTS)


def test_deletion_looks_up_only_what_it_removes(
    store: BlendChroma, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add_documents(documents())
    found: list[str] = []
    get = Chroma.get

    def seen(*args: Any, **kwargs: Any) -> dict[str, Any]:
        answer = get(*args, **kwargs)
        found.extend(answer["ids"])
        return answer

    monkeypatch.setattr(Chroma, "get", seen)
    store.delete(where={"n": 0})
    assert len(found) == 1 and recorder.kept == set(TEXTS[1:])


class OfAnn(Chroma):
    """A store that shows and removes the documents of one user only."""

    def get(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return super().get(*args, **{**kwargs, "where": {"user": "ann"}})


class RemovingOfAnn(OfAnn):
    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> None:
        super().delete(ids, **{**kwargs, "where": {"user": "ann"}})


@pytest.mark.parametrize("kind", [OfAnn, RemovingOfAnn])
@pytest.mark.parametrize("asked", [{}, {"limit": 9}])
def test_what_a_stores_own_class_hides_or_spares_keeps_its_kv(
    embeddings: Any, recorded_llm: ChatBlend, recorder: Any, tmp_path: Path, kind: Any, asked: Any
) -> None:
    store = warm(kind("things", embeddings, persist_directory=str(tmp_path)), recorded_llm)
    store.add_texts(TEXTS, [{"user": user} for user in ("ann", "ann", "bob")])
    everything: Any = {"user": {"$ne": "bob" if kind is OfAnn else "nobody"}}
    store.delete(where=everything, **asked)
    assert recorder.kept == {TEXTS[2]}


# -- which store a document belongs to --------------------------------------------------------------------


def test_reopened_store_is_the_same(make: Any, recorder: Any, recorded_llm: Any) -> None:
    make(llm=recorded_llm).add_texts(TEXTS, ids=["a", "b", "c"])
    reopened = make(llm=recorded_llm)
    assert reopened.sync().unchanged == 3
    reopened.delete(["a"])
    assert recorder.kept == set(TEXTS[1:])


def test_stores_keep_the_documents_of_others(
    make: Any, recorder: Any, recorded_llm: Any, embeddings: Any, tmp_path: Path
) -> None:
    elsewhere = BlendChroma(
        "things", embeddings, persist_directory=str(tmp_path / "elsewhere"), llm=recorded_llm
    )
    in_memory = BlendChroma("things", embeddings, client=chromadb.EphemeralClient(), llm=recorded_llm)
    stores = [make(llm=recorded_llm), make("other", llm=recorded_llm), elsewhere, in_memory]
    for n, store in enumerate(stores):
        store.add_texts([f"text {n}"], ids=["a"])
    names = {store._kv_name() for store in stores}
    assert len(names) == 4 and sum(name.startswith("volatile:") for name in names) == 1
    for n, store in enumerate(stores):
        store.delete(["a"])
        assert recorder.deleted == [f"text {m}" for m in range(n + 1)]


# -- without a model, and with one given later ------------------------------------------------------------


def test_store_without_model_stores_and_is_synced_later(make: Any, recorder: Any, recorded_llm: Any) -> None:
    store = make()
    ids = store.add_texts(TEXTS, ids=["a", "b", "c"])
    assert store.similarity_search("sea", k=1) and ids == ["a", "b", "c"]
    store.delete(["c"])
    with pytest.raises(ConfigError, match=r"store\.llm = "):
        store.sync()
    assert not recorder.starts and not recorder.kept

    store.llm = recorded_llm
    store.add_texts(["Ice melts."])
    assert recorder.kept == {"Ice melts."}
    report = store.sync()
    assert recorder.kept == {*TEXTS[:2], "Ice melts."}
    assert (report.added, report.unchanged, report.chunks) == (2, 1, 2)


def test_sync_repairs_drift(store: BlendChroma, recorder: Any, embeddings: Any, tmp_path: Path) -> None:
    store.add_texts(TEXTS, ids=["a", "b", "c"])
    plain = Chroma("things", embeddings, persist_directory=str(tmp_path / "db"))
    plain.delete(["a"])
    plain.add_texts(["Grass grows.", "Ice melts."], ids=["b", "d"])
    report = store.sync()
    assert recorder.kept == {"Grass grows.", "Ice melts.", TEXTS[2]}
    assert (report.added, report.removed, report.changed, report.unchanged) == (1, 1, 1, 1)


def test_sync_sees_every_page(make: Any, recorder: Any, recorded_llm: Any) -> None:
    store = make()
    store.add_texts([f"text {n}" for n in range(2100)])
    store.llm = recorded_llm
    assert store.sync().added == 2100


# -- searching --------------------------------------------------------------------------------------------


def test_search_starts_no_engine_and_opens_no_library(make: Any, recorder: Any, recorded_llm: Any,
                                                       tmp_path: Path) -> None:  # fmt: skip
    make().add_texts(TEXTS)
    make(llm=recorded_llm).similarity_search("sea")
    assert not recorder.starts and not recorder.prefetched
    unused = ChatBlend(kv_dir=tmp_path / "kv")
    assert make(llm=unused).similarity_search("sea")
    assert unused.chat._lease.opened(unused.settings, unused.kv_dir) is None
    assert not (tmp_path / "kv").exists()


def test_search_answers_though_reading_ahead_failed(
    store: BlendChroma, recorder: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add_texts(TEXTS)

    def fail(*args: Any) -> None:
        raise EngineError("the engine has died")

    monkeypatch.setattr(recorder, "prefetch", fail)
    with caplog.at_level(logging.DEBUG, "blendrag"):
        assert len(store.similarity_search("sea", k=2)) == 2
    assert "could not read KV ahead" in caplog.text
    assert all(record.levelno == logging.DEBUG for record in caplog.records if "KV" in record.message)


def test_subclass_reads_ahead_once(embeddings: Any, recorder: Any, recorded_llm: Any, tmp_path: Path) -> None:
    class Loud(BlendChroma):
        def similarity_search(self, query: str, *args: Any, **kwargs: Any) -> list[Document]:
            return super().similarity_search(query.upper(), *args, **kwargs)

    store = Loud("things", embeddings, persist_directory=str(tmp_path / "db"), llm=recorded_llm)
    store.add_texts(TEXTS)
    store.similarity_search("sea", k=1)
    store.similarity_search_with_score("sea", k=1)
    assert [len(texts) for texts in recorder.prefetched] == [1, 1]
