"""The same contract on the real engine, one for the whole run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import chromadb
import pytest
from llama_index.core import Document, MockEmbedding, PromptTemplate, StorageContext, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import QueryBundle
from llama_index.core.tools import FunctionTool
from llama_index.core.vector_stores import SimpleVectorStore
from pydantic import BaseModel

from llama_index.llms.blendrag import BlendChromaVectorStore, BlendLLM, warm
from llama_index.llms.blendrag.events import BlendCacheEvent
from llamaindex_ways import every_way, text_of

pytestmark = pytest.mark.engine

QUESTION = "In one sentence: what is it for?"
GREEDY = {"max_tokens": 24}


@pytest.fixture(scope="module")
def llm(
    engine: Any, engine_options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BlendLLM]:
    options = {**engine_options, "min_cached_tokens": 16}
    window, kv_dir = options.pop("max_model_len"), tmp_path_factory.mktemp("kv")
    with BlendLLM(
        model=options.pop("model"), kv_dir=kv_dir, context_window=window, engine_options=options, **GREEDY
    ) as opened:
        yield opened


@pytest.fixture(scope="module")
def prose() -> str:
    """Some pages of a library's own description."""
    import importlib.metadata

    text = importlib.metadata.distribution("pydantic").read_text("METADATA") or ""
    return text.partition("\n\n")[2][1500:5500]


@pytest.fixture(scope="module")
def index(llm: BlendLLM, prose: str, tmp_path_factory: pytest.TempPathFactory) -> VectorStoreIndex:
    chroma = chromadb.PersistentClient(str(tmp_path_factory.mktemp("chroma"))).create_collection("prose")
    store = BlendChromaVectorStore(chroma_collection=chroma, llm=llm)
    return VectorStoreIndex.from_documents(
        [Document(text=prose, metadata={"file_name": "pydantic.md"})],
        storage_context=StorageContext.from_defaults(vector_store=store),
        transformations=[SentenceSplitter(chunk_size=200, chunk_overlap=0)],
        embed_model=MockEmbedding(embed_dim=4),
    )


async def test_nine_methods_give_one_text(llm: BlendLLM) -> None:
    ways = await every_way(llm, "Name three colours.")
    texts = {text_of(responses[-1]) for responses in ways.values()}
    assert len(texts) == 1 and texts != {""}
    usage = ways["chat"][0].raw["usage"]
    for name, responses in ways.items():
        assert responses[-1].raw["usage"] == usage
        if "stream" in name:
            assert len(responses) > 3
            assert "".join(one.delta for one in responses) == text_of(responses[-1])
    assert usage["completion_tokens"] == 24
    assert usage["prompt_tokens"] == len(
        llm._chat.library.plan([{"role": "user", "content": "Name three colours."}]).token_ids
    )


@pytest.mark.parametrize("mode", ["compact", "tree_summarize"])
def test_query_engine_reuses_every_document_and_off_none(
    llm: BlendLLM, index: VectorStoreIndex, events: Any, mode: Any
) -> None:
    engine = index.as_query_engine(llm=llm, similarity_top_k=4, response_mode=mode)
    found = {one.node.get_content("llm").strip() for one in engine.retrieve(QueryBundle(QUESTION))}
    assert str(engine.query(QUESTION))
    (blended,) = events.of(BlendCacheEvent)
    assert blended.evidence["plain"] is None
    assert len(blended.evidence["documents"]) == len(found) == 4
    assert all(row["kind"] == "cached" for row in blended.evidence["documents"])
    assert blended.evidence["reused"] + blended.evidence["prefix"] > blended.evidence["prompt"] / 2

    llm.blend = False
    engine.query(QUESTION)
    llm.blend = True
    plain = events.of(BlendCacheEvent)[1]
    assert plain.evidence["reused"] == 0
    assert plain.usage["prompt_tokens"] == blended.usage["prompt_tokens"]


class Verdict(BaseModel):
    """What the text is about."""

    about: Literal["validation", "cooking"]
    certain: bool


async def test_schema_is_kept_even_by_a_tiny_model(llm: BlendLLM) -> None:
    prompt = PromptTemplate("Pydantic checks data. What is this about?")
    assert isinstance(llm.structured_predict(Verdict, prompt), Verdict)
    assert isinstance(await llm.astructured_predict(Verdict, prompt), Verdict)
    assert isinstance(list(llm.stream_structured_predict(Verdict, prompt))[-1], Verdict)
    assert isinstance(llm.as_structured_llm(Verdict).complete("Pydantic checks data.").raw, Verdict)


def set_light(on: bool) -> str:
    """Switch the light."""
    return f"light={on}"


LIGHT = FunctionTool.from_defaults(set_light)


def test_required_tool_is_called_even_by_a_tiny_model(llm: BlendLLM) -> None:
    answer = llm.predict_and_call([LIGHT], user_msg="Switch the light on.", tool_required=True)
    assert answer.sources[0].tool_name == "set_light"
    assert answer.response in ("light=True", "light=False")


async def test_agent_calls_its_tool_and_ends_with_text(llm: BlendLLM) -> None:
    agent = FunctionAgent(tools=[LIGHT], llm=llm, initial_tool_choice="set_light")
    answer = await agent.run("Switch the light on.", max_iterations=4)
    assert [call.tool_name for call in answer.tool_calls][:1] == ["set_light"]
    assert answer.tool_calls[0].tool_output.content.startswith("light=")


def test_stop_and_log_probabilities(llm: BlendLLM) -> None:
    whole = llm.complete("Count from one to five in words.")
    cut = whole.text[len(whole.text) // 2 :][:4]
    assert llm.complete("Count from one to five in words.", stop=[cut]).text == whole.text.partition(cut)[0]
    logprobs = llm.complete("Hello?", logprobs=3, max_tokens=4).logprobs
    assert logprobs is not None and len(logprobs) == 4
    assert all(len(top) >= 3 and math.exp(top[0].logprob) <= 1 for top in logprobs)


def test_warmed_index_in_memory_is_blended(llm: BlendLLM, prose: str) -> None:
    index = VectorStoreIndex.from_documents(
        [Document(text=prose[-900:])],
        transformations=[SentenceSplitter(chunk_size=128, chunk_overlap=0)],
        storage_context=StorageContext.from_defaults(vector_store=warm(SimpleVectorStore(), llm)),
        embed_model=MockEmbedding(embed_dim=4),
    )
    nodes = [one.node for one in index.as_retriever(similarity_top_k=2).retrieve(QUESTION)]
    response = llm.complete("\n\n".join(node.get_content("llm") for node in nodes))
    assert response.raw["blendrag"]["plain"] is None
    assert response.additional_kwargs["cache_read_tokens"] > 0
