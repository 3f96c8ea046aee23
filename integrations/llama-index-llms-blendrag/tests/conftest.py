"""A stand-in for the engine, and for nothing else: library, tokenizer, catalogue and Chroma are real."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler

from blendrag.engine.client.engine import Engine
from blendrag.engine.wire.operations import Deleted, Ingested
from blendrag.serving.lease import Lease
from blendrag.store.catalogue import Catalogue
from blendrag.store.identity import KVIdentity
from llama_index.llms.blendrag import BlendLLM
from scripted_engine import Scripted


@dataclass
class ScriptedEngine(Scripted):
    """Has a data plane, too, which computes nothing."""

    prefilled: list[str] = field(default_factory=list)
    prefetched: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    starts: int = 0
    catalogue: Catalogue | None = None

    def call(self, method: str, store: str, *args: Any) -> Any:
        if method == "open_store":
            self.catalogue = Catalogue.open(Path(store), KVIdentity(**args[0]))
            return "store"
        if method == "ingest":
            for key, *_ in args[0]:
                self.prefilled.append(key)
                assert self.catalogue is not None
                self.catalogue.mark_ready(key, 1)
            tokens = sum(len(ids) for _, ids, *_ in args[0])
            return asdict(Ingested(tokens, adopted=0, seconds=0.01, nbytes=1))
        if method in ("prefetch", "delete"):
            (self.prefetched if method == "prefetch" else self.deleted).extend(args[0])
        if method == "delete":
            return asdict(Deleted(len(args[0]), ()))
        if method == "close_store" and self.catalogue is not None:
            self.catalogue.close()
        return 0

    def call_later(self, method: str, *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(self.call(method, *args))
        return done

    def calls_later(self, *calls: Sequence[Any]) -> Future[None]:
        for call in calls:
            self.call(*call)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def release(self) -> None:
        pass


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine()

    def shared(settings: Any, progress: Any = None) -> ScriptedEngine:
        engine.starts += 1
        return engine

    monkeypatch.setattr(Engine, "shared", shared)
    monkeypatch.setattr(Lease, "_open", {})
    monkeypatch.setattr(Lease, "_claims", {})
    yield engine


@pytest.fixture
def threads(scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The threads that call the engine."""
    call, threads = scripted.call, set[int]()

    def noted(method: str, *args: Any) -> Any:
        threads.add(threading.get_ident())
        return call(method, *args)

    monkeypatch.setattr(scripted, "call", noted)
    return threads


@pytest.fixture
def make_llm(scripted: ScriptedEngine, model_dir: Path, tmp_path: Path) -> Iterator[Callable[..., BlendLLM]]:
    made: list[BlendLLM] = []

    def make(**options: Any) -> BlendLLM:
        llm = BlendLLM(**{"model": str(model_dir), "kv_dir": tmp_path / "kv", **options})
        scripted.tokenizer = llm._chat.library.tokenizer
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.close()


@pytest.fixture
def llm(make_llm: Callable[..., BlendLLM]) -> BlendLLM:
    """Blends whatever is known, however short."""
    return make_llm(min_cached_tokens=1)


class Events(BaseEventHandler):
    """Keeps all events."""

    seen: list[Any] = []  # noqa: RUF012

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.seen.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.seen if isinstance(event, kind)]


@pytest.fixture
def events() -> Iterator[Events]:
    handler = Events(seen=[])
    root = get_dispatcher()
    root.add_event_handler(handler)
    yield handler
    root.event_handlers.remove(handler)
