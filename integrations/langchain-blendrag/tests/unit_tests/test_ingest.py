"""ingest(): split, store and warm, as often as it takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter

from blendrag.errors import ConfigError, EngineError
from langchain_blendrag import BlendChroma, warm

PARAGRAPHS = RecursiveCharacterTextSplitter(
    separators=["\n\n"], chunk_size=1, chunk_overlap=0, keep_separator=False
)


def book(chapters: int = 4, paragraphs: int = 25) -> list[Document]:
    return [
        Document(
            "\n\n".join(f"Chapter {c}, paragraph {p} tells of it." for p in range(paragraphs)),
            metadata={"source": f"chapter {c}"},
        )
        for c in range(chapters)
    ]


def ingest(store: Any, documents: list[Document]) -> Any:
    return store.ingest(documents, show_progress=False, text_splitter=PARAGRAPHS)


def test_second_run_does_only_what_is_new(store: Any, recorder: Any, embeddings: Any) -> None:
    first = ingest(store, book())
    assert (first.added, first.skipped, first.chunks) == (100, 0, 100) and first.tokens == recorder.tokens > 0
    embedded = len(embeddings.embedded)
    second = ingest(store, book())
    assert (second.added, second.skipped, second.chunks, second.tokens) == (0, 100, 0, 0)
    assert len(embeddings.embedded) == embedded
    third = ingest(store, [Document("New.", metadata={"source": "chapter 0"}), *book()])
    assert (third.added, third.skipped, third.chunks) == (1, 100, 1)


def test_store_that_is_only_listed_gets_nothing_twice(
    recorded_llm: Any, recorder: Any, embeddings: Any
) -> None:
    class Listed(InMemoryVectorStore):
        get_by_ids = VectorStore.get_by_ids

    store = warm(Listed(embeddings), recorded_llm)
    assert ingest(store, book()).added == len(embeddings.embedded) == 100
    assert ingest(store, book()).skipped == len(embeddings.embedded) == 100


class ElasticsearchStore(VectorStore):
    """A store named as one that is listed by its client, whose service here has no listing."""

    client, query_field, _store = object(), "text", SimpleNamespace(index="kb")

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        return list(kwargs["ids"])

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return []

    @classmethod
    def from_texts(cls, *args: Any, **kwargs: Any) -> ElasticsearchStore:
        return cls()


def test_store_that_fails_to_be_listed_gets_what_it_is_given(recorded_llm: Any, recorder: Any) -> None:
    assert ingest(warm(ElasticsearchStore(), recorded_llm), book()).added == len(recorder.kept) == 100


def test_store_that_keeps_the_last_addition_only_is_refused(recorded_llm: Any, embeddings: Any) -> None:
    store: Any = warm(InMemoryVectorStore(embeddings), recorded_llm)
    store.mode = "overwrite"  # as LanceDB's has
    with pytest.raises(ConfigError, match="mode='append'"):
        ingest(store, book())
    store.api_key = "of its cloud, which takes no notice of that"
    assert ingest(store, book(1)).added == 25
    store.mode, store.api_key = "append", None
    assert ingest(store, book()).added == 75 and len(store.store) == 100


def test_half_of_a_surrogate_pair_costs_no_chunk(store: Any, recorder: Any) -> None:
    paragraphs = [Document("One.\n\nSign \ud835.\n\nThree.", metadata={"source": "a"})]
    assert [ingest(store, paragraphs).added for _ in range(2)] == [3, 0]
    assert recorder.kept == {"One.", "Sign \ufffd.", "Three."}


@pytest.mark.parametrize("call", [1, 2, 4])
def test_interrupt_while_storing_loses_and_repeats_nothing(
    store: Any, recorder: Any, embeddings: Any, call: int
) -> None:
    embeddings.interrupted_at = call
    with pytest.raises(KeyboardInterrupt):
        ingest(store, book())
    done = len(embeddings.embedded)
    assert len(recorder.kept) == done == (call - 1) * 32
    report = ingest(store, book())
    assert (report.added, report.skipped) == (100 - done, done)
    assert len(embeddings.embedded) == len(recorder.prefilled) == len(recorder.kept) == 100


@pytest.mark.parametrize("step", ["register", "prefill"])
def test_chunks_left_cold_by_an_interrupt_are_warmed_by_the_next_run(
    store: Any, recorder: Any, recorded_llm: Any, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(recorded_llm.chat.library.texts, step, interrupt)
        ingest(store, book())
    report = ingest(store, book())
    assert (report.added, report.skipped, report.chunks) == (68, 32, 100)
    assert len(recorder.kept) == 100


def test_failure_to_warm_is_explained(store: Any, recorder: Any) -> None:
    recorder.fails = True
    with pytest.raises(EngineError) as failed:
        ingest(store, book())
    assert "sync()" in failed.value.__notes__[0]


def test_same_text_again_in_one_source_is_kept(store: Any, recorder: Any) -> None:
    notice = Document("All rights reserved.\n\nText.\n\nAll rights reserved.", metadata={"source": "a"})
    elsewhere = Document("All rights reserved.", metadata={"source": "b"})
    report = ingest(store, [notice, elsewhere])
    assert (report.added, report.chunks) == (4, 2)  # four documents, two texts
    assert ingest(store, [notice, elsewhere]).skipped == 4


def test_default_chunks_are_as_long_as_the_setting_at_most(
    store: Any, recorder: Any, recorded_llm: Any
) -> None:
    library = recorded_llm.chat.library
    text = "\n\n".join(f"Paragraph {n} is about the number {n}, and nothing else at all." for n in range(200))
    report = store.ingest([Document(text)], show_progress=False)
    lengths = [len(library.tokenizer.encode(text)) for text in recorder.kept]
    assert report.added == len(lengths) > 1
    assert library.settings.chunk_tokens // 2 < max(lengths) <= library.settings.chunk_tokens


def test_progress_is_shown_unless_it_is_switched_off(
    store: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("TERM", "xterm")  # a dumb one has no bars
    store.ingest(book(1), text_splitter=PARAGRAPHS)
    shown = capfd.readouterr().err
    assert "ingest" in shown
    ingest(store, book(2))
    assert not capfd.readouterr().err


def test_text_splitter_stands_in_for_the_model_to_store(
    embeddings: Any, recorder: Any, tmp_path: Path
) -> None:
    store = BlendChroma("docs", embeddings, persist_directory=str(tmp_path))
    with pytest.raises(ConfigError, match="text_splitter="):
        store.ingest(book())
    report = ingest(store, book(1))
    assert (report.added, report.tokens) == (25, 0) and not recorder.starts


def test_chunk_stands_behind_the_one_before_it_in_its_source(store: Any, recorder: Any) -> None:
    """Also where one batch ends and another begins."""
    ingest(store, book(chapters=2, paragraphs=40))
    for c in range(2):
        for p in range(40):
            before = f"Chapter {c}, paragraph {p - 1} tells of it." if p else ""
            found = recorder.contexts[f"Chapter {c}, paragraph {p} tells of it."]
            assert found.endswith(before) and bool(found) == bool(before)
            assert f"Chapter {1 - c}" not in found


def test_deleted_chunk_leaves_the_kv_of_those_behind_it(store: Any, recorder: Any) -> None:
    first, second, third = store.add_texts(["One.", "Two.", "Three."], [{"source": "a"}] * 3)
    assert recorder.contexts == {"One.": "", "Two.": "One.", "Three.": "One.Two."}
    store.delete([second])
    assert recorder.contexts == {"One.": "", "Three.": ""}
    assert recorder.kept == {"One.", "Three."} and recorder.prefilled[-1] == "Three."
    assert store.sync().unchanged == 2
    store.delete([first, third])
    assert not recorder.contexts


def test_texts_without_a_source_stand_alone(store: Any, recorder: Any) -> None:
    store.add_texts(["One.", "Two."])
    store.add_documents([Document("Three.", metadata={"page": 3}), Document("Four.", metadata={"page": 4})])
    assert not any(recorder.contexts.values())


@pytest.mark.parametrize("source", [["a.md"], None, 3, {"path": "a.md"}])
def test_source_may_be_anything(source: Any, embeddings: Any, recorded_llm: Any, recorder: Any) -> None:
    store = warm(InMemoryVectorStore(embeddings), recorded_llm)
    report = ingest(store, [Document("One.\n\nTwo.", metadata={"source": source})])
    assert report.added == 2 and recorder.kept == {"One.", "Two."}
