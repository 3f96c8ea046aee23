"""A LlamaIndex query engine. Only `llm` and `store` know blendrag; the rest is the one of any tutorial."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import chromadb
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.node_parser import SentenceSplitter
from llamaindex_embeddings import MiniLM

from llama_index.llms.blendrag import BlendChromaVectorStore, BlendLLM
from llama_index.llms.blendrag.events import BlendCacheEvent

PAGES = [
    Document(text=path.read_text(), metadata={"file_name": path.name})
    for path in sorted((Path(__file__).parent / "handbook").glob("*.md"))
]


class LastEvidence(BaseEventHandler):
    """Keeps what the last answer cost: a query engine's response tells of the text and the nodes only."""

    evidence: dict | None = None

    def handle(self, event, **_) -> None:
        if isinstance(event, BlendCacheEvent):
            self.evidence = event.evidence


def main(folder: str) -> None:
    # In a program of your own, take a folder that stays: the next run then has nothing to prefill.
    with BlendLLM(kv_dir=f"{folder}/kv", max_tokens=60) as llm:
        collection = chromadb.PersistentClient(folder).create_collection("handbook")
        store = BlendChromaVectorStore(chroma_collection=collection, llm=llm)
        index = VectorStoreIndex.from_documents(
            PAGES,
            storage_context=StorageContext.from_defaults(vector_store=store),
            embed_model=MiniLM(),
            transformations=[SentenceSplitter(chunk_size=512, chunk_overlap=0)],
        )
        engine = index.as_query_engine(llm=llm, similarity_top_k=2)
        get_dispatcher().add_event_handler(last := LastEvidence())
        for question in ("When is the office in Bergen closed?", "What is the limit of a company card?"):
            print(f"\n{question}\n{engine.query(question)}")

            reused = [row for row in last.evidence["documents"] if row["kind"] == "cached"]
            print(
                f"[{len(reused)} documents reused: {last.evidence['reused']} tokens as they are, "
                f"{last.evidence['recomputed']} recomputed, {last.evidence['fresh']} read as usual; "
                f"first token after {last.evidence['ttft_s']:.2f} s]"
            )


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        main(folder)
