"""``SpeculativeRerank`` in query engines; only the engine is stood in for."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from typing import Any

import pytest
from llama_index.core import MockEmbedding, PromptTemplate, VectorStoreIndex
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from begun import begins
from llama_index.llms.blendrag import BlendLLM, SpeculativeRerank
from llama_index.llms.blendrag.events import BlendCacheEvent
from llama_index.llms.blendrag.nodes import texts_by_id
from prompt_shapes import DOCUMENTS, QUESTION

pytestmark = pytest.mark.filterwarnings("ignore:.*have no KV")

TEMPLATE = PromptTemplate("{context_str}\nIn one word: {query_str}")


class Reranker(BaseNodePostprocessor):
    """Takes a moment. step: what it does with the order; None: it fails."""

    step: int | None = 1

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        time.sleep(0.05)
        if self.step is None:
            raise RuntimeError("the reranker is out of order")
        return nodes[:: self.step][:2]


@pytest.fixture
def index() -> VectorStoreIndex:
    nodes = [TextNode(text=f"{text}\n", metadata={"page": name}) for name, text in DOCUMENTS.items()]
    return VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=2))


@pytest.fixture
def begun(scripted: Any, llm: BlendLLM) -> list[Future[None]]:
    return begins(scripted)


def reranking(llm: BlendLLM, index: VectorStoreIndex, step: int | None, **options: Any) -> Any:
    template = {name: options[name] for name in ("text_qa_template",) if name in options}
    early = SpeculativeRerank(llm=llm, reranker=Reranker(step=step), top_n=2, **template)
    return index.as_query_engine(llm=llm, similarity_top_k=4, node_postprocessors=[early], **options)


def speculations(events: Any) -> list[str]:
    return [event.evidence["speculation"] for event in events.of(BlendCacheEvent)]


@pytest.mark.parametrize("options", [{}, {"streaming": True}, {"text_qa_template": TEMPLATE}])
@pytest.mark.parametrize("way", ["query", "aquery"])
def test_query_engine_asks_the_prompt_that_was_begun(
    way: str,
    options: dict[str, Any],
    llm: BlendLLM,
    index: VectorStoreIndex,
    events: Any,
    begun: list[Future[None]],
) -> None:
    engine = reranking(llm, index, 1, **options)

    async def ask() -> str:
        answer = await engine.aquery(QUESTION)
        if "streaming" in options:
            return "".join([token async for token in answer.async_response_gen()])
        return str(answer)

    answers = [str(engine.query(QUESTION)) if way == "query" else asyncio.run(ask()) for _ in range(2)]
    assert answers[0] == answers[1]
    assert speculations(events) == ["none", "adopted"]


def test_answer_to_other_nodes_is_cancelled_and_discarded(
    llm: BlendLLM, index: VectorStoreIndex, events: Any, begun: list[Future[None]], scripted: Any
) -> None:
    reranking(llm, index, 1).query(QUESTION)
    reranking(llm, index, -1).query(QUESTION)
    assert speculations(events) == ["none", "discarded"] and begun[-1].cancelled()
    _, first, last = scripted.prompts()
    assert first != last


def test_reranker_that_fails_gives_its_own_error_and_cancels_the_answer(
    llm: BlendLLM, index: VectorStoreIndex, begun: list[Future[None]]
) -> None:
    reranking(llm, index, 1).query(QUESTION)
    with pytest.raises(RuntimeError, match="out of order"):
        reranking(llm, index, None).query(QUESTION)
    assert [task.cancelled() for task in begun] == [True]


def test_nothing_is_read_ahead_where_no_answer_is_begun(
    llm: BlendLLM, index: VectorStoreIndex, begun: list[Future[None]], scripted: Any
) -> None:
    llm.collection("kb").add(texts_by_id(index.docstore.docs.values(), False))
    reranking(llm, index, -1).query(QUESTION)
    assert len(scripted.prefetched) == 2 and not begun


def test_nodes_without_a_question_are_not_reranked(llm: BlendLLM, begun: list[Future[None]]) -> None:
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in DOCUMENTS.values()]
    early = SpeculativeRerank(llm=llm, reranker=Reranker(), top_n=2)
    assert early.postprocess_nodes(nodes) == asyncio.run(early.apostprocess_nodes(nodes)) == nodes[:2]
    assert not begun
