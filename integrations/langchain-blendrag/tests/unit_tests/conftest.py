"""A model that says what it is told to, and stores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from langchain_blendrag import BlendChroma, ChatBlend, warm
from scripted_engine import Scripted


@pytest.fixture
def speaker(recorded_llm: ChatBlend, recorder: Any, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    engine, start = Scripted(recorded_llm.chat.library.tokenizer, ["Good day."]), recorder.start

    def started(progress: Any = None) -> Scripted:
        start(progress)
        return engine

    monkeypatch.setattr(recorder, "start", started)
    return engine


@pytest.fixture
def make(recorded_llm: ChatBlend, speaker: Scripted) -> Callable[..., ChatBlend]:
    """Objects whose engine is the ``speaker``."""
    return lambda **options: ChatBlend(kv_dir=recorded_llm.kv_dir, **options)


@pytest.fixture(params=["chroma", "memory"])
def store(request: pytest.FixtureRequest, embeddings: Any, recorded_llm: Any, tmp_path: Path) -> VectorStore:
    """An empty one that is warmed."""
    if request.param == "chroma":
        return BlendChroma("docs", embeddings, persist_directory=str(tmp_path), llm=recorded_llm)
    return warm(InMemoryVectorStore(embeddings), recorded_llm)
