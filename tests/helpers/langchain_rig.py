"""LangChain with our own model and vector store, and an engine that only notes what it is asked: what the
shapes of the recognition tests are run with."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.output_parsers import StrOutputParser
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.tools import BaseTool, tool
from langchain_core.vectorstores import VectorStore

from langchain_blendrag import BlendChroma, ChatBlend
from prompt_shapes import DOCUMENTS, QUESTION
from scripted_engine import Scripted

ANSWER = "It lasts eight years."


async def _all(parts: AsyncIterator[Any]) -> list[Any]:
    return [part async for part in parts]


async def awaited(result: Any) -> Any:
    """What a method gives, asynchronous or not."""
    return await result if hasattr(result, "__await__") else result


# The ways of a runnable to its answer: all parts that it gives.
WAYS: dict[str, Callable[..., list[Any]]] = {
    "invoke": lambda asked, *given, **options: [asked.invoke(*given, **options)],
    "ainvoke": lambda asked, *given, **options: [asyncio.run(asked.ainvoke(*given, **options))],
    "stream": lambda asked, *given, **options: [*asked.stream(*given, **options)],
    "astream": lambda asked, *given, **options: asyncio.run(_all(asked.astream(*given, **options))),
}


class Placed(Embeddings):
    """Finds the documents in their order; a question that names some finds these first."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        order = list(DOCUMENTS.values())
        return [[1.0 if text == one else -0.1 * at for at, one in enumerate(order)] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        named = [name for name in text if name in DOCUMENTS] or list(DOCUMENTS)
        return [1.0 / (1 + named.index(name)) if name in named else 0.0 for name in DOCUMENTS]


@dataclass
class Rig:
    """What LangChain is given, and the ways in which it is driven."""

    llm: ChatBlend
    store: BlendChroma
    engine: Scripted

    def retriever(self, k: int = 3) -> BaseRetriever:
        return self.store.as_retriever(search_kwargs={"k": k})

    def lcel(
        self, prompt: Runnable[Any, Any], context: Runnable[Any, Any] | None = None
    ) -> Runnable[Any, str]:
        context = context or self.retriever() | format_docs
        return {"context": context, "question": RunnablePassthrough()} | prompt | self.llm | StrOutputParser()

    def ask_agent(self, tools: list[BaseTool], queries: Sequence[str] = (), middleware: Any = ()) -> None:
        """The model calls the tool ``retrieve`` with each of ``queries``, and then answers."""
        calls = [{"name": "retrieve", "arguments": {"query": query}} for query in queries]
        self.engine.answers = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls] + [ANSWER]
        prompt = None if middleware else "You have access to a tool that retrieves context. Use it."
        agent = create_agent(self.llm, tools, system_prompt=prompt, middleware=middleware)
        state = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})
        assert state["messages"][-1].text == ANSWER

    def tutorial_tool(self) -> BaseTool:
        @tool(response_format="content_and_artifact")
        def retrieve(query: str) -> tuple[str, list[Document]]:
            """Retrieve information to help answer a query."""
            documents = self.store.similarity_search(query, k=2)
            serialized = "\n\n".join(
                f"Source: {document.metadata}\nContent: {document.page_content}" for document in documents
            )
            return serialized, documents

        return retrieve


class Unlisted(VectorStore):
    """The least a vector store can be."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def add_texts(self, texts: Any, metadatas: Any = None, *, ids: Any = None, **_: Any) -> list[str]:
        given = list(texts)
        added = ids or [uuid.uuid4().hex for _ in given]
        self.texts.update(zip(added, given, strict=True))
        return list(added)

    def delete(self, ids: Any = None, **kwargs: Any) -> bool:
        return ids is not None and all(self.texts.pop(id, None) for id in ids)

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return [Document(text) for text in list(self.texts.values())[:k]]

    @classmethod
    def from_texts(cls, texts: list[str], embedding: Any, metadatas: Any = None, **kwargs: Any) -> Any:
        raise NotImplementedError


def format_docs(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)
