"""Every way in which LlamaIndex puts nodes into prompts, with LlamaIndex itself, Chroma and our own LLM; only
the engine is stood in for. ``UPDATE_PROMPTS=1`` writes the prompts anew; ``-rP`` shows the table.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import chromadb
import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.query_engine import CitationQueryEngine
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.core.tools import RetrieverTool

from llama_index.llms.blendrag import BlendChromaVectorStore, BlendLLM
from prompt_shapes import DOCUMENTS, QUESTION, Shape, Shapes

pytestmark = pytest.mark.filterwarnings("error::blendrag.errors.BlendragWarning")

SHAPES = Shapes("LlamaIndex", __file__)
shape = SHAPES.shape

WINDOW = 2048


class Placed(BaseEmbedding):
    """Finds the documents in their order; a question that names some finds these first."""

    def _get_text_embedding(self, text: str) -> list[float]:
        return [1.0 if text.endswith(one) else -0.1 * at for at, one in enumerate(DOCUMENTS.values())]

    def _get_query_embedding(self, query: str) -> list[float]:
        named = [name for name in query if name in DOCUMENTS] or list(DOCUMENTS)
        return [1.0 / (1 + named.index(name)) if name in named else 0.0 for name in DOCUMENTS]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)


@dataclass
class Rig:
    llm: BlendLLM
    index: VectorStoreIndex
    engine: Any

    def query(self, mode: str, k: int = 3, **options: Any) -> str:
        engine = self.index.as_query_engine(llm=self.llm, response_mode=mode, similarity_top_k=k, **options)
        return str(engine.query(QUESTION))

    def chat(self, mode: str, *turns: str) -> None:
        engine = self.index.as_chat_engine(chat_mode=mode, llm=self.llm, similarity_top_k=2)
        for turn in turns:
            engine.chat(turn)


def node(name: str, text: str) -> TextNode:
    return TextNode(text=text, id_=name, metadata={"file_name": f"{name}.md", "page": 3})


# Names of texts: "1" is document 1 as LlamaIndex writes it, metadata first, and "1b" its bare text.
NAMES = {
    text: name + suffix
    for name, document in DOCUMENTS.items()
    for suffix, mode in (("", MetadataMode.LLM), ("b", MetadataMode.NONE))
    for text in [node(name, document).get_content(metadata_mode=mode)]
}


@pytest.fixture
def rig(make_llm: Callable[..., BlendLLM], scripted: Any, monkeypatch: pytest.MonkeyPatch) -> Rig:
    llm = make_llm(context_window=WINDOW, engine_options={"min_cached_tokens": 1})
    collection = chromadb.EphemeralClient().get_or_create_collection(
        "recognition", configuration={"hnsw": {"space": "ip"}}
    )
    store = BlendChromaVectorStore(chroma_collection=collection, llm=llm)
    store.clear()
    nodes = [node(name, text) for name, text in DOCUMENTS.items()]
    context = StorageContext.from_defaults(vector_store=store)
    return Rig(llm, VectorStoreIndex(nodes, storage_context=context, embed_model=Placed()), scripted)


# -- query engines -------------------------------------------------------------------------------------------


@shape("query engine, `compact` (the default)", "1 2 3")
def compact(rig: Rig) -> None:
    assert rig.query("compact") == rig.engine.answers[0]


@shape("query engine, streamed", "1 2 3", like="compact")
def compact_streaming(rig: Rig) -> None:
    assert rig.query("compact", streaming=True) == rig.engine.answers[0]


@shape("query engine, `aquery`", "1 2 3", like="compact")
def compact_aquery(rig: Rig) -> None:
    engine = rig.index.as_query_engine(llm=rig.llm, similarity_top_k=3)
    assert str(asyncio.run(engine.aquery(QUESTION))) == rig.engine.answers[0]


@shape("query engine, `multimodal=True`: metadata and text apart", "1b 2b 3b")
def compact_blocks(rig: Rig) -> None:
    rig.query("compact", multimodal=True)


def of_mode(mode: str, **options: Any) -> None:
    """Registers a query engine of a response mode."""

    def run(rig: Rig) -> None:
        rig.query(mode)

    run.__name__ = mode
    shape(f"query engine, `{mode}`", "1 2 3", **options)(run)


of_mode("refine")
of_mode("tree_summarize")
of_mode("accumulate")
of_mode("compact_accumulate", like="compact")
of_mode("simple_summarize", found="", escaped=True)


@shape("`CitationQueryEngine`: metadata and text apart", "1b 2b 3b")
def citation(rig: Rig) -> None:
    CitationQueryEngine.from_args(rig.index, llm=rig.llm, similarity_top_k=3).query(QUESTION)


@shape("`CitationQueryEngine`, metadata shown", "1 2 3")
def citation_metadata(rig: Rig) -> None:
    CitationQueryEngine.from_args(
        rig.index, llm=rig.llm, similarity_top_k=3, metadata_mode=MetadataMode.LLM
    ).query(QUESTION)


# -- nodes that do not fit -----------------------------------------------------------------------------------


@shape("`compact`, window too small: nodes are cut", "1 2 3 4", found="1 2 3~ 4")
def compact_cut(rig: Rig) -> None:
    rig.llm.max_tokens = WINDOW - 840
    rig.query("compact", k=4)


@shape("`tree_summarize`, window too small: nodes are cut", "1 2 3 4", found="1 2 3~ 4")
def tree_summarize_cut(rig: Rig) -> None:
    rig.llm.max_tokens = WINDOW - 384
    rig.query("tree_summarize", k=4)


# -- chat engines --------------------------------------------------------------------------------------------


@shape("chat engine, `context`, two turns", "1 2 3 1")
def context_chat(rig: Rig) -> None:
    rig.chat("context", "1 2?", "And 3 1?")


@shape("chat engine, `condense_plus_context` (the default), two turns", "1 2 3 1")
def condense_plus_context(rig: Rig) -> None:
    rig.engine.answers = ["1 and 2.", "What do 3 and 1 say?", "3 and 1."]
    rig.chat("best", "1 2?", "And those?")


@shape("chat engine, `condense_question`, two turns", "1 2 3 1")
def condense_question(rig: Rig) -> None:
    rig.engine.answers = ["1 and 2.", "What do 3 and 1 say?", "3 and 1."]
    rig.chat("condense_question", "1 2?", "And those?")


@shape("chat engine, `context`, documents in the history as well", "2 1 1 2")
def history(rig: Rig) -> None:
    told = ChatMessage(f"Keep this in mind:\n{written('1')}\n---\n{written('2')}")
    engine = rig.index.as_chat_engine(chat_mode="context", llm=rig.llm, similarity_top_k=2)
    engine.chat("2 1?", chat_history=[told, ChatMessage("I will.", role="assistant")])


# -- agents --------------------------------------------------------------------------------------------------


@shape("`FunctionAgent` with `RetrieverTool`, searching twice", "1 2 1 2 2 3")
def agent_retriever_tool(rig: Rig) -> None:
    searching = RetrieverTool.from_defaults(
        rig.index.as_retriever(similarity_top_k=2), name="search", description="Searches the manual."
    )
    calls = [{"name": "search", "arguments": {"input": query}} for query in ("1 2", "2 3")]
    rig.engine.answers = [f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls] + ["Eight years."]

    async def run() -> str:
        agent = FunctionAgent(tools=[searching], llm=rig.llm, system_prompt="Search the manual.")
        return str(await agent.run(QUESTION))

    assert asyncio.run(run()) == "Eight years."


def written(name: str) -> str:
    return node(name, DOCUMENTS[name]).get_content(metadata_mode=MetadataMode.LLM)


# -- the tests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES.all, ids=str)
def test_every_document_is_recognised_and_an_escaped_one_from_the_next_prompt_on(
    shape: Shape, rig: Rig
) -> None:
    SHAPES.check_run(shape, rig, rig.llm._chat.library, NAMES)


def test_table_in_the_documentation_is_what_was_measured() -> None:
    SHAPES.check_page()
