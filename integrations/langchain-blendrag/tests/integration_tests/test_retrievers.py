"""``SpeculativeRetriever`` in chains, on the real engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import FakeListChatModel
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from blendrag.errors import ConfigError
from langchain_blendrag import BlendChroma, ChatBlend, SpeculativeRetriever
from one_engine import ENGINE, kv_dir
from workbench import real_texts

PROMPT = ChatPromptTemplate.from_template("From these pages:\n\n{context}\n\nAnswer: {question}")
QUESTION = "What are they about?"


class Found(BaseRetriever):
    """Always the same documents, after a moment."""

    documents: list[Document]
    seconds: float = 0.0

    def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
        time.sleep(self.seconds)
        return self.documents


class Failing(BaseRetriever):
    def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
        time.sleep(0.05)
        raise RuntimeError("this retriever is out of order")


class Reranker(BaseDocumentCompressor):
    """Takes a moment, and does with the documents what it is told."""

    does: Callable[[Sequence[Document]], Sequence[Document]]

    def compress_documents(self, documents: Sequence[Document], query: str, callbacks: Any = None) -> Any:
        time.sleep(0.05)
        return self.does(documents)


def first_two(documents: Sequence[Document]) -> Sequence[Document]:
    return documents[:2]


def last_two(documents: Sequence[Document]) -> Sequence[Document]:
    return documents[:-3:-1]


def fails(documents: Sequence[Document]) -> Sequence[Document]:
    raise RuntimeError("the reranker is out of order")


def joined(documents: Sequence[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def asked(documents: Sequence[Document], question: str) -> Any:
    return PROMPT.invoke({"context": joined(documents), "question": question})


@pytest.fixture(scope="module")
def documents(tokenizer: Any) -> list[Document]:
    texts = [tokenizer.decode(ids).strip() for ids in real_texts(tokenizer, tokens=160, per_package=1)]
    return [Document(text, id=f"s{number}") for number, text in enumerate(texts[:4])]


@pytest.fixture
def llm(engine: Any, documents: list[Document]) -> Iterator[ChatBlend]:
    """One of the test's own, which has learned nothing yet."""
    made = ChatBlend(**ENGINE, kv_dir=kv_dir(), max_tokens=16, min_cached_tokens=16)
    kb = BlendChroma("speculative", DeterministicFakeEmbedding(size=8), llm=made)
    kb.add_documents(documents)
    yield made
    kb.delete_collection()


def chain(retriever: BaseRetriever, llm: Runnable[Any, Any]) -> Runnable[str, Any]:
    context = retriever | RunnableLambda(joined)
    return {"context": context, "question": RunnablePassthrough()} | PROMPT | llm


def invoke(chain: Runnable[str, Any], question: str) -> Any:
    return chain.invoke(question, {"configurable": {"thread_id": "t"}})


def ainvoke(chain: Runnable[str, Any], question: str) -> Any:
    return asyncio.run(chain.ainvoke(question, {"configurable": {"thread_id": "t"}}))


def stream(chain: Runnable[str, Any], question: str) -> Any:
    first, *rest = chain.stream(question)
    for chunk in rest:
        first += chunk
    return first


def speculation(answer: Any) -> str:
    return str(answer.response_metadata["blendrag"]["speculation"])


def assert_frees_the_engine(engine: Any) -> None:
    deadline = time.monotonic() + 60
    while not (engine.idle and engine.reset_prefix_cache()):
        assert time.monotonic() < deadline, "an answer that nobody asked for holds KV"
        time.sleep(0.05)


@pytest.mark.engine
@pytest.mark.parametrize("way", [invoke, ainvoke, stream])
@pytest.mark.parametrize("kind", ["reranker", "retriever"])
def test_chain_asks_another_prompt_than_was_begun(
    way: Any, kind: str, llm: ChatBlend, documents: list[Document]
) -> None:
    model = llm.bind(stop=["never"], max_tokens=12)
    slow: Any = (
        Reranker(does=first_two) if kind == "reranker" else Found(documents=documents[:2], seconds=0.05)
    )
    retriever = SpeculativeRetriever(llm=model, prompt=asked, fast=Found(documents=documents), slow=slow, k=2)
    ask = chain(retriever, model)
    assert [speculation(way(ask, QUESTION)) for _ in range(2)] == ["none", "adopted"]
    assert retriever.invoke(QUESTION) == documents[:2]


@pytest.mark.engine
def test_reranked_answer_is_one_to_the_provisional_documents(
    llm: ChatBlend, documents: list[Document], engine: Any
) -> None:
    fast = Found(documents=documents)
    same = SpeculativeRetriever(llm=llm, prompt=asked, fast=fast, slow=Reranker(does=first_two), k=2)
    other = same.model_copy(update={"slow": Reranker(does=last_two)})
    invoke(chain(same, llm), QUESTION)
    answer = invoke(chain(other, llm), QUESTION)
    assert speculation(answer) == "discarded"
    assert answer.text == llm.invoke(asked(documents[:-3:-1], QUESTION)).text
    assert_frees_the_engine(engine)


@pytest.mark.engine
@pytest.mark.parametrize("way", [invoke, ainvoke])
def test_reranker_that_fails_gives_another_error_or_leaves_an_answer_running(
    way: Any, llm: ChatBlend, documents: list[Document], engine: Any
) -> None:
    fast, endless = Found(documents=documents), llm.bind(max_tokens=3000, ignore_eos=True)
    same = SpeculativeRetriever(llm=llm, prompt=asked, fast=fast, slow=Reranker(does=first_two), k=2)
    invoke(chain(same, llm), QUESTION)
    for slow in (Reranker(does=fails), Failing()):
        broken = SpeculativeRetriever(llm=endless, prompt=asked, fast=fast, slow=slow, k=2)
        with pytest.raises(RuntimeError, match="out of order"):
            way(chain(broken, endless), QUESTION)
        assert_frees_the_engine(engine)


@pytest.mark.engine
def test_wrong_prompt_of_the_user_changes_an_answer(
    llm: ChatBlend, documents: list[Document], engine: Any
) -> None:
    def other(documents: Sequence[Document], question: str) -> str:
        return f"{question} {joined(documents)}"

    slow = Reranker(does=first_two)
    retriever = SpeculativeRetriever(llm=llm, prompt=other, fast=Found(documents=documents), slow=slow, k=2)
    plain = chain(Found(documents=documents[:2]), llm).invoke(QUESTION)
    for _ in range(3):
        answer = invoke(chain(retriever, llm), QUESTION)
        assert (answer.text, speculation(answer)) == (plain.text, "none")


def test_model_that_begins_no_answers_is_taken(documents: list[Document]) -> None:
    other, found = FakeListChatModel(responses=["?"]), Found(documents=documents)
    with pytest.raises(ConfigError, match="ChatBlend"):
        SpeculativeRetriever(llm=other, prompt=asked, fast=found, slow=found)
