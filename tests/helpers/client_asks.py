"""What a client does with a real server: it has a document's KV kept, and asks about it.

    python client_asks.py http://localhost:8000 blendrag langchain_blendrag

Runs where nothing is installed but the client that is tried. Fails unless the document's KV is reused.
"""

from __future__ import annotations

import sys
import uuid
from typing import Any

Evidence = dict[str, Any]


def blendrag(url: str, text: str, prompt: str) -> Evidence:
    from blendrag import RemoteChat

    chat = RemoteChat(url, max_tokens=8)
    chat.collection("alone").add({"one": [text]})
    evidence = chat.complete(chat.request(prompt)).evidence
    return {"reused": evidence.reused, "recomputed": evidence.recomputed}


def langchain_blendrag(url: str, text: str, prompt: str) -> Evidence:
    from langchain_core.embeddings import DeterministicFakeEmbedding
    from langchain_core.vectorstores import InMemoryVectorStore

    from langchain_blendrag import ChatBlend, warm

    llm = ChatBlend(base_url=url, max_tokens=8)
    store = warm(InMemoryVectorStore(DeterministicFakeEmbedding(size=8)), llm)
    store.add_texts([text])
    (found,) = store.similarity_search("When?", k=1)
    assert found.page_content == text
    return llm.invoke(prompt).response_metadata["blendrag"]


def llama_index(url: str, text: str, prompt: str) -> Evidence:
    from llama_index.core.schema import TextNode
    from llama_index.core.vector_stores import SimpleVectorStore

    from llama_index.llms.blendrag import BlendLLM, warm

    llm = BlendLLM(base_url=url, max_tokens=8)
    warm(SimpleVectorStore(), llm).add([TextNode(text=text, embedding=[1.0])])
    return llm.complete(prompt).raw["blendrag"]


if __name__ == "__main__":
    url, *names = sys.argv[1:]
    for name in names:
        text = (
            f"Of {name}, {uuid.uuid4().hex}: holidays are asked for in writing, and granted by turns. " * 10
        )
        evidence = globals()[name](url, text.strip(), f"{text.strip()}\n\nHow are holidays asked for?")
        assert evidence["reused"] > 100, (name, evidence)
        assert evidence["reused"] + evidence["recomputed"] > 150, (name, evidence)
        print(name, evidence["reused"], evidence["recomputed"])
