"""A chat model whose engine is stood in for; library, catalogue, recogniser, tokenizer are the real ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings

from blendrag.engine.wire.operations import Ingested
from blendrag.errors import EngineError
from blendrag.serving.library import Library
from blendrag.store.contexts import Chunk
from engine_facts import FACTS
from langchain_blendrag import ChatBlend


class EngineRecorder:
    """Where the engine session is: notes what it is asked for, by text, and computes nothing."""

    id = "recorder"

    def __init__(self, library: Library) -> None:
        self._library = library
        self.stack, self.prefix = library.session.stack, library.session.prefix
        self._texts: dict[str, str] = {}
        self.forget()

    def forget(self) -> None:
        self.store: EngineRecorder | None = None  # itself: it is the store's client, too
        self.fails = False
        self.starts = 0
        self.tokens = 0
        self.prefilled: list[str] = []
        self.deleted: list[str] = []
        self.prefetched: list[list[str]] = []

    def start(self, progress: Any = None) -> Any:
        if self.fails:
            raise EngineError("the engine did not start")
        if self.store is None:
            self.store = self
            self.starts += 1
        return SimpleNamespace(blends=True, facts=FACTS, max_model_len=8192)

    def open(self, progress: Any = None) -> EngineRecorder:
        self.start()
        return self

    def later(self, work: Future[Any]) -> None:
        pass

    def settle(self) -> None:
        pass

    def ingest(self, chunks: Sequence[Chunk]) -> Ingested:
        self._texts |= {chunk.key: chunk.text for chunk in chunks}
        for chunk in chunks:
            self.prefilled.append(chunk.text)
            self._library.catalogue.mark_ready(chunk.key, len(chunk.token_ids))
        tokens = sum(len(chunk.token_ids) for chunk in chunks)
        self.tokens += tokens
        return Ingested(tokens, 0, 0.0, 0)

    def ingest_later(self, chunks: Sequence[Chunk]) -> Future[Any]:
        self.ingest(chunks)
        return self.check_later(())

    def check_later(self, chunks: Sequence[Chunk]) -> Future[Any]:
        ended = Future[Any]()
        ended.set_result(None)
        return ended

    def flush(self) -> int:
        return 0

    def delete(self, keys: Sequence[str]) -> None:
        self.deleted += [self._texts[key] for key in keys]

    def prefetch(self, keys: Sequence[str]) -> None:
        self.prefetched.append([self._texts[key] for key in keys])

    def close(self) -> None:
        self.store = None

    @property
    def contexts(self) -> dict[str, str]:
        """What each text stands behind, without what is written between texts."""
        entries, decode = self._library.catalogue.entries(), self._library.tokenizer.decode
        return {entry.text: decode(entry.context).replace("\n", "") for entry in entries}

    @property
    def kept(self) -> set[str]:
        """Texts whose KV is there."""
        return {entry.text for entry in self._library.catalogue.entries() if entry.state == "ready"}


@pytest.fixture(scope="session")
def _recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ChatBlend, EngineRecorder]]:
    llm = ChatBlend(kv_dir=tmp_path_factory.mktemp("recorded") / "kv")
    library = llm.chat.library
    recorder: Any = EngineRecorder(library)
    library.session = library.texts.session = library.sidecars.session = recorder
    yield llm, recorder
    llm.close()


@pytest.fixture
def recorded_llm(_recorded: tuple[ChatBlend, EngineRecorder]) -> ChatBlend:
    """Holds no documents yet; its engine has not started, and is the ``recorder``."""
    llm, recorder = _recorded
    library = llm.chat.library
    library.texts.release(library.catalogue.owners())
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
