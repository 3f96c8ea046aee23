"""``SpeculativeRerank``: the answer is begun while nodes are still reranked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import Field, SerializeAsAny
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle

from llama_index.llms.blendrag.base import BlendLLM

if TYPE_CHECKING:
    from blendrag import Speculation


class SpeculativeRerank(BaseNodePostprocessor):
    """A postprocessor that reranks as another one does. Meanwhile, the LLM may begin to answer from the first
    nodes as they were retrieved: if they turn out to be the final ones, the query engine finds its answer
    begun; else it is thrown away.

    Expects the prompt of the response mode "compact", LlamaIndex's default: another one saves nothing, and
    changes no answer. Whether anything is begun is the LLM's to say: only while its engine has nothing else
    to do, and only as long as it saves time. Else the KV of these nodes is read ahead.
    """

    llm: BlendLLM = Field(description="That of the query engine.", exclude=True)
    reranker: SerializeAsAny[BaseNodePostprocessor] = Field(description="Gives the final nodes.")
    top_n: int = Field(description="How many nodes the reranker gives.", ge=1)
    text_qa_template: BasePromptTemplate = Field(
        default=DEFAULT_TEXT_QA_PROMPT_SEL, description="That of the query engine.", exclude=True
    )

    @classmethod
    def class_name(cls) -> str:
        return "SpeculativeRerank"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if query_bundle is None:
            return self.reranker.postprocess_nodes(nodes)
        asked = self._asked(nodes[: self.top_n], query_bundle)
        with self._settled(nodes, query_bundle, asked, self.llm.speculate(asked)) as final:
            final += self.reranker.postprocess_nodes(nodes, query_bundle)
        return final

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if query_bundle is None:
            return await self.reranker.apostprocess_nodes(nodes)
        asked = self._asked(nodes[: self.top_n], query_bundle)
        with self._settled(nodes, query_bundle, asked, await self.llm.aspeculate(asked)) as final:
            final += await self.reranker.apostprocess_nodes(nodes, query_bundle)
        return final

    def _asked(self, nodes: Sequence[NodeWithScore], query: QueryBundle) -> list[ChatMessage]:
        """Return what a query engine asks."""
        texts = [node.get_content(MetadataMode.LLM).strip() for node in nodes]
        context = "\n\n".join(text for text in texts if text)
        return self.llm._get_messages(self.text_qa_template, context_str=context, query_str=query.query_str)

    @contextmanager
    def _settled(
        self,
        nodes: Sequence[NodeWithScore],
        query: QueryBundle,
        asked: Sequence[ChatMessage],
        expected: Speculation,
    ) -> Iterator[list[NodeWithScore]]:
        """End what was begun for other nodes than the final ones, or before an error."""
        final: list[NodeWithScore] = []
        same = False
        try:
            if not expected.begun:
                self.llm.prefetch(node.get_content(MetadataMode.LLM) for node in nodes[: self.top_n])
            yield final
            same = self._asked(final, query) == asked
        finally:
            if not same:
                expected.end()
