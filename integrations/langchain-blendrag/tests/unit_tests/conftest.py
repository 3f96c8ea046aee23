"""A model that says what it is told to, a token at a time, in as many tokens as it is asked for; stores."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from blendrag.engine.client.generation import Delta, Sampling
from engine_facts import FACTS
from langchain_blendrag import BlendChroma, ChatBlend, warm


@dataclass
class Speaker:
    """Where the engine is."""

    tokenizer: Any
    says: str = "Good day."
    asked: list[Sampling] = field(default_factory=list)

    blends, max_model_len, facts = True, 8192, FACTS

    def stream(self, token_ids: Sequence[int], sampling: Sampling, *_: Any) -> Generator[Delta]:
        self.asked.append(sampling)
        tokens = self.tokenizer.encode(self.says, add_special_tokens=False)
        said = tokens[: sampling.max_tokens]
        for number, token in enumerate(said, 1):
            ended = ("stop" if said == tokens else "length") if number == len(said) else None
            likely = [{token: -0.5}] if sampling.logprobs else []
            yield Delta(self.tokenizer.decode([token]), [token], 0.1, ended, logprobs=likely)

    async def astream(self, *request: Any) -> AsyncGenerator[Delta]:
        for delta in self.stream(*request):
            yield delta


@pytest.fixture
def speaker(recorded_llm: ChatBlend, recorder: Any, monkeypatch: pytest.MonkeyPatch) -> Speaker:
    engine = Speaker(recorded_llm.chat.library.tokenizer)
    monkeypatch.setattr(recorder, "start", lambda progress=None: engine)
    return engine


@pytest.fixture
def make(recorded_llm: ChatBlend, speaker: Speaker) -> Callable[..., ChatBlend]:
    """Objects whose engine is the ``speaker``."""
    return lambda **options: ChatBlend(kv_dir=recorded_llm.kv_dir, **options)


@pytest.fixture(params=["chroma", "memory"])
def store(request: pytest.FixtureRequest, embeddings: Any, recorded_llm: Any, tmp_path: Path) -> VectorStore:
    """An empty one that is warmed."""
    if request.param == "chroma":
        return BlendChroma("docs", embeddings, persist_directory=str(tmp_path), llm=recorded_llm)
    return warm(InMemoryVectorStore(embeddings), recorded_llm)
