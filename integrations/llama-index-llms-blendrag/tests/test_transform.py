"""``WarmKV`` in pipelines: what it prefills, and where it refuses to run."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import uuid
from typing import Any

import pytest
from llama_index.core import Document, MockEmbedding, VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.types import VectorStoreQuery
from llama_index.vector_stores.qdrant import QdrantVectorStore
from qdrant_client import QdrantClient

from blendrag.errors import ConfigError
from llama_index.llms.blendrag import BlendLLM, WarmKV

DOCUMENTS = [Document(text="One.", metadata={"page": 1}), Document(text="Two.")]


def kept(llm: BlendLLM) -> set[str]:
    return {entry.text for entry in llm._chat.library.catalogue.entries() if entry.state == "ready"}


def test_nodes_pass_unchanged_and_are_prefilled(llm: BlendLLM) -> None:
    nodes = [TextNode(text="One.", metadata={"page": 1}), TextNode(text="Two.")]
    assert WarmKV(llm=llm)(nodes) is nodes
    assert kept(llm) == {"page: 1\n\nOne.", "One.", "Two."}


def test_index_in_memory_is_warmed_with_every_insertion(llm: BlendLLM) -> None:
    index = VectorStoreIndex.from_documents(
        DOCUMENTS,
        transformations=[SentenceSplitter(), WarmKV(llm=llm)],
        embed_model=MockEmbedding(embed_dim=2),
    )
    index.insert(Document(text="Three."))
    assert kept(llm) == {"page: 1\n\nOne.", "One.", "Two.", "Three."}


def test_same_texts_again_compute_nothing(llm: BlendLLM, scripted: Any) -> None:
    warm = WarmKV(llm=llm)
    for _ in range(2):
        warm([TextNode(text="One.")])
    asyncio.run(warm.acall([TextNode(text="One.")]))
    assert len(scripted.prefilled) == 1


def test_pipelines_cache_does_not_keep_sync_from_repairing(llm: BlendLLM) -> None:
    warm = WarmKV(llm=llm)
    pipeline = IngestionPipeline(transformations=[SentenceSplitter(), warm])
    nodes = pipeline.run(documents=DOCUMENTS)
    warm.remove([nodes[0].node_id])
    assert kept(llm) == {"Two."}
    pipeline.run(documents=DOCUMENTS)  # from the cache
    report = warm.sync(nodes)
    assert (report.added, report.unchanged) == (1, 1)
    assert kept(llm) == {"page: 1\n\nOne.", "One.", "Two."}


def test_two_collections_do_not_forget_each_others_nodes(llm: BlendLLM) -> None:
    one, two = WarmKV(llm=llm, collection="one"), WarmKV(llm=llm, collection="two")
    one([TextNode(text="One.")])
    two([TextNode(text="Two.")])
    one.sync([])
    assert kept(llm) == {"Two."}


def test_worker_process_refuses_in_one_sentence(llm: BlendLLM, scripted: Any) -> None:
    script = (
        "import pickle, sys\n"
        "warm = pickle.load(sys.stdin.buffer)\n"
        "try:\n    warm([])\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps(WarmKV(llm=llm)), capture_output=True, timeout=120
    )
    said = done.stdout.decode()
    assert said.startswith("ConfigError WarmKV does not run in worker processes"), done.stderr.decode()
    assert said.count("\n") == 1


def test_pipeline_with_workers_starts_no_engine_in_them(llm: BlendLLM) -> None:
    # No SentenceSplitter: in a worker it asks the network for its tokenizer, and the pool waits for ever.
    pipeline = IngestionPipeline(transformations=[WarmKV(llm=llm)], disable_cache=True)
    with pytest.raises(ConfigError, match="use num_workers=1"):
        pipeline.run(documents=DOCUMENTS, num_workers=2)


def test_llm_is_no_part_of_what_is_serialised(llm: BlendLLM) -> None:
    assert "llm" not in WarmKV(llm=llm).to_dict()


def test_node_is_forgotten_by_the_id_that_a_store_makes_of_its_own(llm: BlendLLM) -> None:
    store = QdrantVectorStore("kb", client=QdrantClient(":memory:"))
    warm = WarmKV(llm=llm, collection="kb")
    texts = ("One.", "Two.")
    nodes = [TextNode(id_=uuid.uuid4().hex, text=text, embedding=[0.1, 0.2]) for text in texts]
    store.add(list(warm(nodes)))
    found = store.query(VectorStoreQuery(query_embedding=[0.1, 0.2], similarity_top_k=2)).ids
    assert found and set(found).isdisjoint(node.node_id for node in nodes)
    warm.remove(found)
    assert not kept(llm)
