"""Conversations, from their prompts through the predictor to what leaves the tiers of a running engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blendrag.chat.chat import Chat
from blendrag.chat.request import ChatRequest
from blendrag.engine.client.generation import Sampling
from blendrag.eviction.fitted import Fitted, save_fitted
from blendrag.forecast.features import features_of
from blendrag.lab.eviction.fit_predictor import train_on_file
from blendrag.models import DEFAULT_EMBEDDER
from blendrag.serving import forecaster
from blendrag.serving.collection import Collection
from blendrag.settings import Settings
from waiting import until
from word_embedder import write_dialogs
from workbench import Bench, Open

pytestmark = pytest.mark.engine

WAIT_S = 240.0  # until a test gives up


@pytest.fixture
def fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's predictor is looked for; the models' folder stays the one of all tests."""
    file = tmp_path / "fitted.safetensors"
    monkeypatch.setattr(forecaster, "fitted_file", lambda cache_dir: file)
    return file


@pytest.fixture
def chat(
    bench: Bench,
    engine_options: dict[str, Any],
    texts: list[str],
    tmp_path: Path,
    fitted: Path,
) -> Iterator[Chat]:
    """Over four texts, with room for two of them in RAM, and with a predictor."""
    trained = train_on_file(
        write_dialogs(tmp_path / "dialogs.jsonl", 60), features_of(DEFAULT_EMBEDDER), held_out=0.0
    )
    save_fitted(fitted, Fitted(trained.classifier, trained.embedder))
    tiers = [{"kind": "ram", "chunks": 2, "policy": "lpc"}, {"kind": "disk"}]
    opened = Chat(Settings.load(**engine_options, min_cached_tokens=16, tiers=tiers), tmp_path / "kv")
    Collection(opened.library, "tests").add({str(number): [text] for number, text in enumerate(texts[:4])})
    opened.library.session.open().empty_ram()
    yield opened
    opened.close()


def test_chunks_of_a_goodbye_leave_and_those_of_an_open_question_stay(chat: Chat, texts: list[str]) -> None:
    library = chat.library

    def asks(conversation: str, text: str, words: str) -> dict[str, int]:
        """Tiers that the answer's chunk came from; when the policy knows of the prompt."""
        message = {"role": "user", "content": f"{text}\n\n{words}"}
        before = library.eviction()["forecasts"]["answered"]
        promoted = library.session.open().stats().tiers["ram"]["promotions"]
        request = ChatRequest([message], Sampling(max_tokens=2), conversation=conversation)
        evidence = chat.complete(request).evidence
        until(lambda: library.eviction()["forecasts"]["answered"] == before + 1, WAIT_S)
        if "disk" in evidence.tiers:
            until(lambda: library.session.open().stats().tiers["ram"]["promotions"] == promoted + 1, WAIT_S)
        return evidence.tiers

    assert asks("a", texts[0], "where is the hotel") == {"disk": 1}
    assert asks("b", texts[1], "thanks bye") == {"disk": 1}
    assert asks("c", texts[2], "when is the show") == {"disk": 1}  # RAM is full: the oldest is that of a
    assert asks("a", texts[0], "how much is the room") == {"ram": 1}
    assert asks("b", texts[1], "when is the train") == {"disk": 1}
    stats = library.session.open().stats().policy_calls
    assert (stats["used"]["calls"], stats["forecast"]["calls"]) == (5, 5)
    assert library.eviction()["forecasts"]["reason"] == ""


@pytest.mark.parametrize(("policy", "asked"), [("gdsf", 0), ("lpc", 1)])
def test_predictor_is_asked_for_policies_that_listen(
    open_index: Open, folder: Path, fitted: Path, policy: str, asked: int
) -> None:
    index = open_index(tiers=[{"kind": "ram", "chunks": 4, "policy": policy}, {"kind": "disk"}])
    index.ingest([folder])
    index.ask("What is this?", conversation="mine")
    index.ask("And that?")  # alone, it belongs to no conversation
    assert index.stats()["eviction"]["policies"] == {"ram": policy}
    assert index.stats()["eviction"]["forecasts"]["asked"] == asked
    assert index.stats()["policy_calls"]["used"]["calls"] == 2
    until(lambda: index.stats()["eviction"]["forecasts"]["unanswered"] == asked, WAIT_S)
    assert ("blendrag fit" in index.stats()["eviction"]["forecasts"]["reason"]) == bool(asked)
