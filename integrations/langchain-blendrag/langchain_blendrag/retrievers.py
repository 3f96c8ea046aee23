"""``SpeculativeRetriever``: the answer is begun while the final documents are still looked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.language_models import LanguageModelInput
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableBinding, RunnableConfig
from langchain_core.runnables.config import ContextThreadPoolExecutor
from pydantic import model_validator

from blendrag.errors import ConfigError
from langchain_blendrag.chat_models import ChatBlend

if TYPE_CHECKING:
    from blendrag import Speculation


class SpeculativeRetriever(BaseRetriever):
    """A retriever that gives the documents of a slow retriever or reranker. Meanwhile, the model may begin to
    answer from those of a fast one: if they turn out to be the same, the chain finds its answer begun; else
    it is thrown away.

    Whether anything is begun is the chat's to say: only while its engine has nothing else to do, and only as
    long as it saves time. Else the KV of the fast one's documents is read ahead.

    Example:
        ```python
        def asked(documents, question):
            return prompt.invoke({"context": format_docs(documents), "question": question})


        retriever = SpeculativeRetriever(
            llm=llm, prompt=asked, fast=kb.as_retriever(search_kwargs={"k": 20}), slow=reranker, k=5
        )
        ```
    """

    llm: Runnable[LanguageModelInput, Any]
    """The ``ChatBlend`` that the chain asks, or what ``bind`` made of it."""
    prompt: Callable[[Sequence[Document], str], LanguageModelInput]
    """A function that makes the chain's prompt of documents and the question. A prompt that differs from the
    chain's saves nothing, and changes no answer."""
    fast: BaseRetriever
    """The retriever of provisional documents."""
    slow: BaseRetriever | BaseDocumentCompressor
    """The retriever of the final documents; or what makes them of the provisional ones, as rerankers do."""
    k: int | None = None
    """Number of provisional documents that would be final ones; None: all."""

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        _ = self._model  # a wrong one is said now, not with the first question
        return self

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        callbacks, slow = run_manager.get_child(), self.slow
        config = RunnableConfig(callbacks=callbacks)
        with ContextThreadPoolExecutor(1) as thread:
            later = thread.submit(slow.invoke, query, config) if isinstance(slow, BaseRetriever) else None
            found = self.fast.invoke(query, config)
            asked = self.prompt(found[: self.k], query)
            with self._settled(found, query, asked, self._model.speculate(asked, **self._bound)) as final:
                if later:
                    final += later.result()
                else:
                    assert isinstance(slow, BaseDocumentCompressor), "or it is a retriever"
                    final += slow.compress_documents(found, query, callbacks)
        return final

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        callbacks, slow = run_manager.get_child(), self.slow
        config = RunnableConfig(callbacks=callbacks)
        later = asyncio.create_task(slow.ainvoke(query, config)) if isinstance(slow, BaseRetriever) else None
        try:
            found = await self.fast.ainvoke(query, config)
            asked = self.prompt(found[: self.k], query)
            expected = await self._model.aspeculate(asked, **self._bound)
            with self._settled(found, query, asked, expected) as final:
                if later:
                    final += await later
                else:
                    assert isinstance(slow, BaseDocumentCompressor), "or it is a retriever"
                    final += await slow.acompress_documents(found, query, callbacks)
        finally:
            if later:
                later.cancel()
        return final

    @contextmanager
    def _settled(
        self, found: Sequence[Document], query: str, asked: LanguageModelInput, expected: Speculation
    ) -> Iterator[list[Document]]:
        """End what was begun for other documents than the final ones, or before an error."""
        final: list[Document] = []
        same = False
        try:
            if not expected.begun:
                self._model.chat.prefetch(document.page_content for document in found[: self.k])
            yield final
            same = self.prompt(final, query) == asked
        finally:
            if not same:
                expected.end()

    @property
    def _model(self) -> ChatBlend:
        model = self.llm.bound if isinstance(self.llm, RunnableBinding) else self.llm
        if not isinstance(model, ChatBlend):
            raise ConfigError("llm must be the ChatBlend that the chain asks, or what bind() made of it")
        return model

    @property
    def _bound(self) -> Mapping[str, Any]:
        return self.llm.kwargs if isinstance(self.llm, RunnableBinding) else {}
