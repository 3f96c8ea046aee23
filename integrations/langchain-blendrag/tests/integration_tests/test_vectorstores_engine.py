"""BlendChroma and warm() with the engine: what they warmed is used by the chat model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from langchain_blendrag import BlendChroma, ChatBlend, warm
from stores import keys_of

pytestmark = pytest.mark.engine

FACTS = [
    Document(f"Machine {n} in hall {n % 7} was serviced by team {n * 3}. " * 12, metadata={"source": f"m{n}"})
    for n in range(3)
]


@pytest.fixture(params=["chroma", "memory"])
def store(request: pytest.FixtureRequest, chat_blend: ChatBlend, embeddings: Any, tmp_path: Path) -> Any:
    if request.param == "chroma":
        made = BlendChroma("machines", embeddings, persist_directory=str(tmp_path), llm=chat_blend)
    else:
        made = warm(InMemoryVectorStore(embeddings), chat_blend)
    yield made
    made._collection_of_kv().clear()


def cached(chat_blend: ChatBlend, store: VectorStore, question: str) -> int:
    found = store.similarity_search(question, k=2)
    context = "\n\n".join(document.page_content for document in found)
    usage = chat_blend.invoke(f"{context}\n\n{question}").usage_metadata
    assert usage is not None
    return usage["input_token_details"]["cache_read"]


def test_warmed_documents_are_reused(chat_blend: ChatBlend, store: Any) -> None:
    store.ingest(FACTS, show_progress=False)
    assert cached(chat_blend, store, "Which team serviced machine 1?") > 100
    assert store.ingest(FACTS, show_progress=False).tokens == 0
    assert store.sync().tokens == 0


def test_removed_documents_leave_the_disk(chat_blend: ChatBlend, store: Any) -> None:
    ids = store.add_documents(FACTS)
    library = chat_blend.chat.library
    keys = keys_of(library, [document.page_content for document in FACTS])
    assert library.catalogue.ready(keys) == keys
    store.delete(ids)
    assert not library.catalogue.known() & keys


def test_removed_text_leaves_the_kv_of_what_stood_behind_it(chat_blend: ChatBlend, store: Any) -> None:
    parts = [Document(fact.page_content, metadata={"source": "all"}) for fact in FACTS]
    first, *others = store.add_documents(parts)
    library = chat_blend.chat.library
    texts = [part.page_content.strip() for part in parts]

    def contexts() -> list[bool]:
        return [len(entry.context) > 0 for entry in library.catalogue.entries() if entry.text in texts]

    assert contexts() == [False, True, True]
    before = keys_of(library, texts[1:])
    store.delete([first])
    assert contexts() == [False, True]
    after = keys_of(library, texts[1:])
    assert not before & after
    assert store.sync().tokens == 0, "nor are they prefilled twice"
    assert library.catalogue.ready(after) == after
    assert cached(chat_blend, store, "Which team serviced machine 1?") > 100
    store.delete(others)
