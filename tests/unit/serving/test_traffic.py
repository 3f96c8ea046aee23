"""Prompts that are answered are logged, if that is wanted, and can be replayed. No engine is started here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from blendrag.chat.request import ChatRequest
from blendrag.chat.turn import Turn
from blendrag.engine.client.generation import Delta
from blendrag.lab.eviction.trace import read_log
from blendrag.serving.evidence import Evidence
from blendrag.serving.library import Library
from blendrag.serving.session import EngineSession
from blendrag.settings import Settings
from engine_facts import FACTS

FIRST = "The warranty of the battery lasts for eight years or 160,000 kilometres. " * 4
SECOND = "The spare wheel is under the floor of the boot, behind the tool box. " * 4
END = Delta(" Eight years.", [1, 2, 3], 0.01, finish_reason="stop")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv("BLENDRAG_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def opened(folder: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Library:
    settings = Settings.load(max_model_len=512, model=str(model_dir), embedder="./none", **options)
    library = Library(folder / "kv", settings)
    library.texts.register({"a": [FIRST], "b": [SECOND]})
    store = Mock(id="opened")
    engine = SimpleNamespace(blends=True, facts=FACTS, max_model_len=512)
    monkeypatch.setattr(library.session, "start", lambda progress=None: engine)
    monkeypatch.setattr(EngineSession, "store", store)
    monkeypatch.setattr(library.session, "open", lambda progress=None: store)
    return library


@pytest.fixture
def library(folder: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    library = opened(folder, model_dir, monkeypatch, outcome_log=True)
    yield library
    library.close()


def answered(library: Library, request: ChatRequest) -> Evidence:
    answer = Turn(library, library.settings, request).feed(END).answer
    assert answer is not None
    return answer.evidence


def chat(library: Library, content: str, conversation: str | None = None) -> None:
    answered(library, ChatRequest([{"role": "user", "content": content}], conversation=conversation))


def test_answered_prompts_can_be_replayed(library: Library, folder: Path) -> None:
    library.start()
    sizes = {entry.text: len(entry.token_ids) for entry in library.catalogue.entries()}
    chat(library, f"{FIRST}\n\n{SECOND}\n\nHow long?", "ada")
    chat(library, "What is a fjord?", "ada")
    chat(library, f"{SECOND}\n\nWhere is the wheel?", "ada")
    answered(library, ChatRequest(f"{FIRST}\n\nHow far?"))  # a rendered prompt belongs to no conversation
    library.close()
    trace = read_log(folder / "cache" / "evictor" / "prompts.sqlite")
    both, second, first = trace.requests
    assert both.sizes == (sizes[FIRST.strip()], sizes[SECOND.strip()])
    assert second.keys == both.keys[1:] and first.keys == both.keys[:1]
    assert both.conversation == second.conversation and first.conversation is None


def test_prompts_are_not_logged_unasked(
    folder: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = opened(folder, model_dir, monkeypatch)
    library.start()
    chat(library, f"{FIRST}\n\nHow long?")
    library.close()
    assert not (folder / "cache" / "evictor").exists()


def test_log_that_cannot_be_written_fails_no_prompt(library: Library, folder: Path) -> None:
    (folder / "cache").mkdir(exist_ok=True)
    (folder / "cache" / "evictor").write_text("in the way")
    library.start()
    chat(library, f"{FIRST}\n\nHow long?", "ada")


def test_budget_that_nothing_came_of_is_told_of(
    folder: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = opened(folder, model_dir, monkeypatch, kv_budget=256, blend=False)
    assert answered(library, ChatRequest(f"{FIRST}\n\nHow far?")).kv_whole == "it was not blended"
    library.close()
