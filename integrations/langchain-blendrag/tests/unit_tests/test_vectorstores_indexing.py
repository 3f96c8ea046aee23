"""LangChain's indexing API on warming stores."""

from __future__ import annotations

from typing import Any, Literal, get_args

import pytest
from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.vectorstores import VectorStore

Cleanup = Literal["incremental", "full", "scoped_full"] | None
CLEANUPS = [None, *get_args(get_args(Cleanup)[0])]


class Indexed:
    def __init__(self, store: VectorStore, cleanup: Cleanup) -> None:
        self.store, self.cleanup = store, cleanup
        self.records = InMemoryRecordManager(namespace="docs")
        self.records.create_schema()

    def index(self, *documents: Document, **options: Any) -> Any:
        return index(
            documents, self.records, self.store, cleanup=self.cleanup, source_id_key="source",
            key_encoder="blake2b", **options,
        )  # fmt: skip


def doc(text: str, source: str, **metadata: Any) -> Document:
    return Document(text, metadata={"source": source, **metadata})


A, B = doc("The sea is salt.", "a"), doc("Grass is green.", "b")


@pytest.mark.parametrize("cleanup", CLEANUPS)
def test_edited_metadata_prefills_nothing_and_drops_nothing(
    store: VectorStore, recorder: Any, cleanup: Cleanup
) -> None:
    indexed = Indexed(store, cleanup)
    indexed.index(A, B)
    tokens = recorder.tokens
    assert tokens > 0
    result = indexed.index(doc(A.page_content, "a", page=2), B)
    assert result["num_added"] == 1 and result["num_deleted"] == (cleanup is not None)
    assert recorder.tokens == tokens and not recorder.deleted
    assert recorder.kept == {A.page_content, B.page_content}


@pytest.mark.parametrize("cleanup", CLEANUPS)
def test_forced_update_prefills_nothing(store: VectorStore, recorder: Any, cleanup: Cleanup) -> None:
    indexed = Indexed(store, cleanup)
    indexed.index(A, B)
    tokens = recorder.tokens
    assert indexed.index(A, B, force_update=True)["num_updated"] == 2
    assert recorder.tokens == tokens and not recorder.deleted
    assert recorder.kept == {A.page_content, B.page_content}


@pytest.mark.parametrize("cleanup", CLEANUPS)
def test_edited_text_replaces_the_old_one(store: VectorStore, recorder: Any, cleanup: Cleanup) -> None:
    indexed = Indexed(store, cleanup)
    indexed.index(A, B)
    indexed.index(A, edited := doc("Grass grows.", "b"))
    old = {B.page_content} if cleanup is None else set()  # without cleanup it stays in the store too
    assert recorder.kept == {A.page_content, edited.page_content} | old
    assert recorder.prefilled == [A.page_content, B.page_content, edited.page_content]


def test_cleaned_up_source_loses_its_kv(store: VectorStore, recorder: Any) -> None:
    indexed = Indexed(store, "full")
    indexed.index(A, B)
    indexed.index(B)
    assert recorder.kept == {B.page_content} and recorder.deleted == [A.page_content]
