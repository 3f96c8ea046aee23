"""A chat model whose engine is stood in for; library, catalogue, recogniser, tokenizer are the real ones."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings

from blendrag.errors import EngineError
from blendrag.serving.library import Library
from langchain_blendrag import ChatBlend


class EngineRecorder:
    """Where the engine session is: notes what it is asked for, by text, and computes nothing."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.stack = library.session.stack
        self._texts: dict[str, str] = {}
        self.forget()

    def forget(self) -> None:
        self.store_id = ""
        self.fails = False
        self.starts = 0
        self.tokens = 0
        self.prefilled: list[str] = []
        self.deleted: list[str] = []
        self.prefetched: list[list[str]] = []

    def start(self, progress: Any = None) -> Any:
        if self.fails:
            raise EngineError("the engine did not start")
        if not self.store_id:
            self.store_id = "recorder"
            self.starts += 1
        return SimpleNamespace(blends=True, facts={"reason": None}, max_model_len=8192)

    def call(self, method: str, *args: Any) -> Any:
        self.start()
        match method:
            case "ingest":
                catalogue, tokens = self._library.catalogue, 0
                entries = catalogue.entries_of(key for key, _ in args[0])
                self._texts |= {entry.key: entry.text for entry in entries}
                for key, token_ids in args[0]:
                    self.prefilled.append(self._texts[key])
                    tokens += len(token_ids)
                    catalogue.mark_ready(key, len(token_ids))
                self.tokens += tokens
                return {"tokens": tokens, "seconds": 0.0, "bytes": 0}
            case "delete":
                self.deleted += [self._texts[key] for key in args[0]]
            case "prefetch":
                self.prefetched.append([self._texts[key] for key in args[0]])
        return 0

    call_later = call

    def close(self) -> None:
        self.store_id = ""

    @property
    def kept(self) -> set[str]:
        """Texts whose KV is there."""
        return {entry.text for entry in self._library.catalogue.entries() if entry.state == "ready"}


@pytest.fixture(scope="session")
def _recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ChatBlend, EngineRecorder]]:
    llm = ChatBlend(kv_dir=tmp_path_factory.mktemp("recorded") / "kv")
    library = llm.chat.library
    recorder: Any = EngineRecorder(library)
    library.session = recorder
    yield llm, recorder
    llm.close()


@pytest.fixture
def recorded_llm(_recorded: tuple[ChatBlend, EngineRecorder]) -> ChatBlend:
    """Holds no documents yet; its engine has not started, and is the ``recorder``."""
    llm, recorder = _recorded
    library = llm.chat.library
    library.release(library.catalogue.owners())
    recorder.forget()
    return llm


@pytest.fixture
def recorder(recorded_llm: ChatBlend, _recorded: tuple[ChatBlend, EngineRecorder]) -> EngineRecorder:
    return _recorded[1]


class CountingEmbeddings(DeterministicFakeEmbedding):
    """Notes what it embeds; ``interrupted_at`` is the call that is interrupted."""

    size: int = 6
    embedded: list[str] = []  # noqa: RUF012
    calls: int = 0
    interrupted_at: int = 0

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.calls += 1
        if self.calls == self.interrupted_at:
            raise KeyboardInterrupt
        self.embedded += texts
        return super().embed_documents(texts)


@pytest.fixture
def embeddings() -> Embeddings:
    return CountingEmbeddings(embedded=[])
