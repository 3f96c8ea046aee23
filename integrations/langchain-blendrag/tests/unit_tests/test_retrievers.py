"""``SpeculativeRetriever`` in chains; only the engine is stood in for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import reduce
from operator import add
from typing import Any

import pytest
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from begun import begins
from blendrag.errors import ConfigError
from blendrag.prompt import decode
from langchain_blendrag import ChatBlend, SpeculativeRetriever
from langchain_rig import WAYS
from prompt_shapes import DOCUMENTS
from scripted_engine import Scripted

pytestmark = pytest.mark.filterwarnings("ignore:.*have no KV")

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


@pytest.fixture
def documents() -> list[Document]:
    return [Document(text) for text in DOCUMENTS.values()]


@pytest.fixture
def begun(speaker: Scripted, recorder: Any, monkeypatch: pytest.MonkeyPatch) -> list[Future[None]]:
    monkeypatch.setattr(recorder, "idle", True, raising=False)
    return begins(speaker)


@pytest.fixture
def llm(make: Callable[..., ChatBlend], begun: list[Future[None]]) -> ChatBlend:
    """One that has learned nothing yet."""
    return make()


def chain(retriever: BaseRetriever, llm: Runnable[Any, Any]) -> Runnable[str, Any]:
    context = retriever | RunnableLambda(joined)
    return {"context": context, "question": RunnablePassthrough()} | PROMPT | llm


def invoke(chain: Runnable[str, Any], way: str = "invoke") -> Any:
    return reduce(add, WAYS[way](chain, QUESTION, {"configurable": {"thread_id": "t"}}))


def speculation(answer: Any) -> str:
    return str(answer.response_metadata["blendrag"]["speculation"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["reranker", "retriever"])
def test_chain_asks_the_prompt_that_was_begun(
    way: str, kind: str, llm: ChatBlend, documents: list[Document]
) -> None:
    model = llm.bind(stop=["never"], max_tokens=12)
    slow: Any = (
        Reranker(does=first_two) if kind == "reranker" else Found(documents=documents[:2], seconds=0.05)
    )
    retriever = SpeculativeRetriever(llm=model, prompt=asked, fast=Found(documents=documents), slow=slow, k=2)
    ask = chain(retriever, model)
    assert [speculation(invoke(ask, way)) for _ in range(2)] == ["none", "adopted"]
    assert retriever.invoke(QUESTION) == documents[:2]


def test_answer_to_other_documents_is_cancelled_and_discarded(
    llm: ChatBlend, documents: list[Document], speaker: Scripted, begun: list[Future[None]]
) -> None:
    fast = Found(documents=documents)
    same = SpeculativeRetriever(llm=llm, prompt=asked, fast=fast, slow=Reranker(does=first_two), k=2)
    other = same.model_copy(update={"slow": Reranker(does=last_two)})
    invoke(chain(same, llm))
    assert other.invoke(QUESTION) == documents[:-3:-1] and begun[-1].cancelled()
    answer = llm.invoke(asked(documents[:-3:-1], QUESTION))
    assert speculation(answer) == "discarded"
    assert documents[-1].page_content in decode(speaker.tokenizer, speaker.asked[-1].token_ids)


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
@pytest.mark.parametrize("slow", [Reranker(does=fails), Failing()])
def test_reranker_that_fails_gives_its_own_error_and_cancels_the_answer(
    way: str, slow: Any, llm: ChatBlend, documents: list[Document], begun: list[Future[None]]
) -> None:
    fast = Found(documents=documents)
    same = SpeculativeRetriever(llm=llm, prompt=asked, fast=fast, slow=Reranker(does=first_two), k=2)
    invoke(chain(same, llm))
    broken = same.model_copy(update={"slow": slow})
    with pytest.raises(RuntimeError, match="out of order"):
        invoke(chain(broken, llm), way)
    assert [task.cancelled() for task in begun] == [True]


async def test_cancelled_search_cancels_the_answer(
    llm: ChatBlend, documents: list[Document], begun: list[Future[None]]
) -> None:
    found = Found(documents=documents, seconds=0.02)
    slow = Found(documents=documents, seconds=2.0)
    retriever = SpeculativeRetriever(llm=llm, prompt=asked, fast=found, slow=found)
    await chain(retriever, llm).ainvoke(QUESTION)
    begun.clear()  # of a first one, on a busy machine
    task = asyncio.create_task(retriever.model_copy(update={"slow": slow}).ainvoke(QUESTION))
    while not begun:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert begun[-1].cancelled()


def test_answer_to_another_prompt_than_the_users_is_not_begun(
    llm: ChatBlend, documents: list[Document], begun: list[Future[None]]
) -> None:
    def other(documents: Sequence[Document], question: str) -> str:
        return f"{question} {joined(documents)}"

    slow = Reranker(does=first_two)
    retriever = SpeculativeRetriever(llm=llm, prompt=other, fast=Found(documents=documents), slow=slow, k=2)
    for _ in range(3):
        assert speculation(invoke(chain(retriever, llm))) == "none"
    assert not begun


def test_model_that_begins_no_answers_is_refused(documents: list[Document]) -> None:
    other, found = FakeListChatModel(responses=["?"]), Found(documents=documents)
    with pytest.raises(ConfigError, match="ChatBlend"):
        SpeculativeRetriever(llm=other, prompt=asked, fast=found, slow=found)
