"""A LlamaIndex chat engine that streams, over an in-memory vector store that `warm` serves.

It puts other documents into the system message at every turn, ahead of the conversation. A prefix cache loses
all it has then; stored KV of documents goes wherever they go.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.vector_stores import SimpleVectorStore
from llamaindex_embeddings import MiniLM

from llama_index.llms.blendrag import BlendLLM, warm
from llama_index.llms.blendrag.events import BlendCacheEvent

PAGES = [
    Document(text=path.read_text(), metadata={"file_name": path.name})
    for path in sorted((Path(__file__).parent / "handbook").glob("*.md"))
]


class LastEvidence(BaseEventHandler):
    """Keeps what the last answer cost: a chat engine's response tells of the text and the nodes only."""

    evidence: dict | None = None

    def handle(self, event, **_) -> None:
        if isinstance(event, BlendCacheEvent):
            self.evidence = event.evidence


def main(folder: str) -> None:
    with BlendLLM(kv_dir=f"{folder}/kv", max_tokens=60) as llm:
        splitter = SentenceSplitter(chunk_size=512, chunk_overlap=0)
        index = VectorStoreIndex.from_documents(
            PAGES,
            embed_model=MiniLM(),
            transformations=[splitter],
            storage_context=StorageContext.from_defaults(vector_store=warm(SimpleVectorStore(), llm)),
        )
        chat = index.as_chat_engine(chat_mode="context", llm=llm, similarity_top_k=2)
        get_dispatcher().add_event_handler(last := LastEvidence())
        for question in ("When is the office in Bergen closed?", "And the one in Porto?"):
            print(f"\n{question}")
            for delta in chat.stream_chat(question).response_gen:
                print(delta, end="", flush=True)

            reused = [row for row in last.evidence["documents"] if row["kind"] == "cached"]
            print(
                f"\n[{len(reused)} documents reused: {last.evidence['reused']} tokens as they are, "
                f"{last.evidence['recomputed']} recomputed, {last.evidence['fresh']} read as usual; "
                f"first token after {last.evidence['ttft_s']:.2f} s]"
            )


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        main(folder)
