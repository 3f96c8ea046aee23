"""LangChain's own tests for vector stores and retrievers: BlendChroma is Chroma, with a model and without.

The engine is stood in for; nothing here needs the network.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import chromadb
import pytest
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from langchain_blendrag import BlendChroma, ChatBlend, warm


def _chroma(llm: ChatBlend | None) -> BlendChroma:
    """Return an empty store of its own."""
    embeddings = VectorStoreIntegrationTests.get_embeddings()
    return BlendChroma(f"test-{uuid.uuid4().hex}", embeddings, client=chromadb.EphemeralClient(), llm=llm)


class TestBlendChroma(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self) -> Iterator[VectorStore]:  # type: ignore[override]
        store = _chroma(None)
        yield store
        store.delete_collection()


class TestBlendChromaWithModel(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, recorded_llm: ChatBlend, recorder: Any) -> Iterator[VectorStore]:  # type: ignore[override]
        store = _chroma(recorded_llm)
        yield store
        # What the test left is warm, and nothing else is.
        assert recorder.kept == {text for text in store.get()["documents"] if text}
        store.delete_collection()


class TestWarmInMemory(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, recorded_llm: ChatBlend, recorder: Any) -> Iterator[VectorStore]:  # type: ignore[override]
        store = warm(InMemoryVectorStore(self.get_embeddings()), recorded_llm)
        yield store
        assert recorder.kept == {stored["text"] for stored in store.store.values()}


class _Retrievers(RetrieversIntegrationTests):
    llm: ChatBlend | None = None

    @property
    def retriever_constructor(self) -> Callable[..., BaseRetriever]:  # type: ignore[override]
        def construct(k: int = 4) -> BaseRetriever:
            store = _chroma(self.llm)
            store.add_documents([Document(f"Fact {n}.", metadata={"n": n}) for n in range(5)])
            return store.as_retriever(search_kwargs={"k": k})

        return construct

    @property
    def retriever_query_example(self) -> str:
        return "Which facts are there?"


class TestBlendChromaRetriever(_Retrievers):
    pass


class TestBlendChromaRetrieverWithModel(_Retrievers):
    @pytest.fixture(autouse=True)
    def _with_model(self, recorded_llm: ChatBlend, recorder: Any) -> Iterator[None]:
        self.llm = recorded_llm
        yield
        assert bool(recorder.prefetched) == bool(recorder.kept)
