"""Conversations, from their prompts through the predictor to what leaves the tiers of a running engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blendrag.chat.chat import Chat
from blendrag.chat.request import ChatRequest
from blendrag.engine.client.generation import Sampling
from blendrag.forecast.classifier import save_weights
from blendrag.forecast.features import Features
from blendrag.forecast.words import open_embedder
from blendrag.lab.eviction.learn_predictor import train_on_file
from blendrag.models import DEFAULT_EMBEDDER
from blendrag.serving import forecaster
from blendrag.serving.collection import Collection
from blendrag.settings import Settings
from word_embedder import write_dialogs
from workbench import Bench, Open

pytestmark = pytest.mark.engine

WAIT_S = 240.0  # until a test gives up


@pytest.fixture
def predictor_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's predictor is looked for; the models' folder stays the one of all tests."""
    monkeypatch.setattr(forecaster, "default_folder", lambda settings: tmp_path / "evictor")
    return tmp_path / "evictor"


@pytest.fixture
def chat(
    bench: Bench,
    engine_options: dict[str, Any],
    texts: list[str],
    tmp_path: Path,
    predictor_folder: Path,
) -> Iterator[Chat]:
    """Over four texts, with room for two of them in RAM."""
    tiers = [{"kind": "ram", "chunks": 2, "policy": "lpc"}, {"kind": "disk"}]
    opened = Chat(Settings.load(**engine_options, min_cached_tokens=16, tiers=tiers), tmp_path / "kv")
    Collection(opened.library, "tests").add({str(number): [text] for number, text in enumerate(texts[:4])})
    opened.library.session.open().empty_ram()
    yield opened
    opened.close()


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_chunks_of_a_goodbye_stay_and_those_of_an_open_question_leave(
    chat: Chat, texts: list[str], tmp_path: Path, predictor_folder: Path
) -> None:
    dialogs = write_dialogs(tmp_path / "dialogs.jsonl", 60)
    trained = train_on_file(dialogs, Features(open_embedder(DEFAULT_EMBEDDER)), held_out=0.0)
    save_weights(predictor_folder, trained.classifier, trained.manifest)
    library = chat.library

    def asks(conversation: str, text: str, words: str) -> dict[str, int]:
        """Tiers that the answer's chunk came from; when the policy knows of the prompt."""
        message = {"role": "user", "content": f"{text}\n\n{words}"}
        before = library.eviction()["forecasts"]["answered"]
        promoted = library.session.open().stats().tiers["ram"]["promotions"]
        request = ChatRequest([message], Sampling(max_tokens=2), conversation=conversation)
        evidence = chat.complete(request).evidence
        until(lambda: library.eviction()["forecasts"]["answered"] == before + 1)
        if "disk" in evidence.tiers:
            until(lambda: library.session.open().stats().tiers["ram"]["promotions"] == promoted + 1)
        return evidence.tiers

    assert asks("a", texts[0], "where is the hotel") == {"disk": 1}
    assert asks("b", texts[1], "thanks bye") == {"disk": 1}
    assert asks("c", texts[2], "when is the show") == {"disk": 1}  # RAM is full: the oldest is that of a
    assert asks("a", texts[0], "how much is the room") == {"ram": 1}
    assert asks("b", texts[1], "when is the train") == {"disk": 1}
    stats = library.session.open().stats().policy_calls
    assert (stats["used"]["calls"], stats["forecast"]["calls"]) == (5, 5)
    assert library.eviction()["forecasts"]["reason"] == ""


def test_other_policy_is_for_the_next_start(open_index: Open, folder: Path, predictor_folder: Path) -> None:
    index = open_index(tiers=[{"kind": "ram", "chunks": 4}, {"kind": "disk"}])
    index.ingest([folder])

    def asked() -> int:
        asked: int = index.stats()["eviction"]["forecasts"]["asked"]
        return asked

    index.ask("What is this?", conversation="mine")
    assert asked() == 0  # nobody would listen
    index.use_policy("lpc")
    assert index.stats()["eviction"]["policies"] == {"ram": "lpc"}
    index.ask("What is that?", conversation="mine")
    assert asked() == 1
    index.ask("And that?")
    assert asked() == 1  # alone, it belongs to no conversation
    until(lambda: index.stats()["eviction"]["forecasts"]["unanswered"] == 1)
    assert "evictor train" in index.stats()["eviction"]["forecasts"]["reason"]
    assert index.stats()["policy_calls"]["used"]["calls"] == 3
    index.use_policy("lru")
    index.ask("And what is this?", conversation="mine")
    assert asked() == 1
