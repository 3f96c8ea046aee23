"""From a prompt that was answered to what leaves a store's tiers. The store is real, there is no engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.chat.request import ChatRequest
from blendrag.chat.turn import Turn
from blendrag.engine.client.generation import Delta
from blendrag.eviction.hazard_file import load_hazard
from blendrag.forecast.background import BackgroundPredictor
from blendrag.forecast.classifier import save_weights
from blendrag.forecast.conversation import Window, conversation_id
from blendrag.forecast.folder import default_folder
from blendrag.forecast.outcome_log import OutcomeLog
from blendrag.lab.eviction.learn_predictor import Trained
from blendrag.prompt import PromptPlan
from blendrag.prompt.plan import Segment
from blendrag.serving import forecaster as module
from blendrag.serving.forecaster import AT_ONCE, CHUNKS, CONVERSATIONS, Forecaster, _parts, wants_forecasts
from blendrag.serving.library import Library
from blendrag.serving.session import EngineSession
from blendrag.settings import Settings
from blendrag.store.kv_store import KVStore
from blendrag.store.tiers import TierSpec
from engine_facts import FACTS
from stores import A, B, C, D, ask, holds, open_stack, put, register
from word_embedder import WordEmbedder, settle

END = Delta(" Eight years.", [1, 2, 3], 0.01, finish_reason="stop")
LPC = (TierSpec(kind="ram", chunks=3, policy="lpc"), TierSpec(kind="disk", chunks=3, policy="lpc"))


class Session:
    """An engine's session as far as forecaster sees it, over a store in this process."""

    def __init__(self, store: KVStore | None = None, stack: tuple[TierSpec, ...] = LPC) -> None:
        self.store: Session | None = self  # its client
        self.stack = stack
        self.calls: list[list[Any]] = []
        self._store = store

    def learn(self, folder: Path) -> None:
        hazard, _ = load_hazard(folder)
        if self._store:
            self._store.learn(hazard)

    def forecast(self, forecasts: Any) -> None:
        self.calls.append(forecasts)
        if self._store:
            self._store.forecast(forecasts)


Open = Callable[..., Forecaster]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.load(cache_dir=tmp_path / "cache")


@pytest.fixture
def trained_here(settings: Settings, trained: Trained) -> None:
    save_weights(default_folder(settings), trained.classifier, trained.manifest)


@pytest.fixture
def begin(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Forecaster with the embedder of words."""
    monkeypatch.setattr(module, "_embedder", WordEmbedder)
    begun: list[Forecaster] = []

    def one(session: Session, **options: Any) -> Forecaster:
        begun.append(Forecaster(session, settings.model_copy(update=options)))  # type: ignore[arg-type]
        return begun[-1]

    yield one
    for each in begun:
        each.close()


def predictors() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "blendrag-predictor"]


def plan(*chunks: str, text: str = "") -> PromptPlan:
    documents = [Segment(f"Document {key}.", (1,), key) for key in chunks]
    return PromptPlan((Segment("system", (0,)), *documents, Segment(text, (2,))))


@pytest.mark.usefixtures("trained_here")
def test_goodbye_keeps_its_chunks(tmp_path: Path, begin: Open) -> None:
    register(tmp_path / "kv", [A, B, C, D])
    store = open_stack(tmp_path / "kv", *LPC)
    forecaster = begin(Session(store))
    said = {A: "how much is the hotel room", B: "thanks bye", C: "when is the show"}
    for number, (chunk, words) in enumerate(said.items(), 1):
        put(store, chunk)
        ask(store, chunk)
        messages = [{"role": "user", "content": f"Document {chunk.key}. {words}"}]
        forecaster.answered(messages, plan(chunk.key), f"c{number}")
        settle(forecaster, number)
    put(store, D)
    assert holds(store, A, B, C, D) == [[True, False, True, True]] * 2  # LRU would give up A
    store.close()


@pytest.mark.usefixtures("trained_here")
def test_conversations_earlier_chunks_are_forgotten_or_come_first(begin: Open) -> None:
    session = Session()
    forecaster = begin(session)
    forecaster.answered("where is the hotel", plan("a", "b", "c"), "mine")
    settle(forecaster, 1)
    forecaster.answered("how much is the room", plan("b", "d"), "mine")
    settle(forecaster, 2)
    (((first, _, some),), ((second, chance, more),)) = session.calls
    assert first == second == conversation_id((), "mine") and 0.0 < chance < 1.0
    assert (some, more) == (["c", "b", "a"], ["d", "b", "c", "a"])


def test_lone_text_or_empty_history_is_a_conversation(begin: Open) -> None:
    forecaster = begin(Session())
    forecaster.answered("where is the hotel", plan("a"), None)
    forecaster.answered([{"role": "system", "content": "Be brief."}], plan("a"), None)
    assert forecaster.counts.asked == 0
    forecaster.answered([{"role": "user", "content": "where"}], plan("a"), None)
    assert forecaster.counts.asked == 1


def test_texts_are_windows_without_what_was_said_before(begin: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    windows: list[Window] = []
    monkeypatch.setattr(BackgroundPredictor, "ask", lambda live, conversation, window: windows.append(window))
    forecaster = begin(Session())
    for number in range(7):
        rendered = f"Rules. Document a. Document b.Question {number}?"
        forecaster.answered(rendered, plan("a", "b"), "mine")
    forecaster.answered("x" * 1_000_000, plan("a"), "long")
    forecaster.answered("short", plan("a"), "long")
    assert windows[0] == Window(("Question 0?",), 1)
    assert windows[6] == Window(tuple(f"Question {number}?" for number in range(2, 7)), 7)
    assert len(windows[-1].prompts[0]) < 3000 < len(windows[-2].prompts[0])


def test_memory_grows_with_conversations_and_chunks(begin: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackgroundPredictor, "ask", lambda *_: True)
    forecaster = begin(Session())
    for number in range(CONVERSATIONS + 50):
        forecaster.ask(f"c{number}", [f"k{number}"], "hi")
    forecaster.ask("long", map(str, range(CHUNKS + 50)), "hi")
    assert len(forecaster._conversations) == CONVERSATIONS and "c0" not in forecaster._conversations
    assert list(forecaster._conversations["long"].chunks) == [str(key) for key in range(50, CHUNKS + 50)]


def test_missing_predictor_is_told_of_twice_or_not_counted(
    begin: Open, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session()
    forecaster = begin(session)
    for number in range(3):
        forecaster.answered([{"role": "user", "content": "hi"}], plan("a"), None)
        settle(forecaster, number + 1)
    assert forecaster.counts.unanswered == 3 and "evictor train" in forecaster.counts.reason
    assert len([record for record in caplog.records if "as LRU" in record.message]) == 1
    assert not session.calls


@pytest.mark.usefixtures("trained_here")
def test_damaged_weights_are_used(begin: Open, settings: Settings) -> None:
    (weights,) = default_folder(settings).glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    session = Session()
    forecaster = begin(session)
    forecaster.answered([{"role": "user", "content": "hi"}], plan("a"), None)
    settle(forecaster, 1)
    assert "damaged" in forecaster.counts.reason and not session.calls


def test_new_predictor_waits_for_a_restart(begin: Open, settings: Settings, trained: Trained) -> None:
    session = Session()
    forecaster = begin(session)
    forecaster.answered("hi", plan("a"), "mine")
    settle(forecaster, 1)
    assert not session.calls
    save_weights(default_folder(settings), trained.classifier, trained.manifest)
    forecaster.answered("hi", plan("a"), "mine")
    settle(forecaster, 2)
    assert len(session.calls) == forecaster.counts.answered == 1 and forecaster.counts.reason == ""


def test_outcomes_are_logged_only_with_a_predictor(begin: Open, settings: Settings) -> None:
    """Under LRU, too: there has to be something to train on first."""
    session = Session(stack=(TierSpec(kind="ram", chunks=3),))
    forecaster = begin(session, outcome_log=True, embedder="words")
    for number in range(3):
        forecaster.answered("hi", plan("a"), "mine")
        settle(forecaster, number + 1)
    forecaster.close()
    assert OutcomeLog(default_folder(settings), "words").count() == 3
    assert not session.calls


def test_outcomes_are_logged_without_being_asked_for(begin: Open, settings: Settings) -> None:
    forecaster = begin(Session())
    forecaster.answered("hi", plan("a"), "mine")
    settle(forecaster, 1)
    forecaster.close()
    assert not list(default_folder(settings).glob("outcomes-*"))


@pytest.mark.usefixtures("trained_here")
def test_store_that_is_not_open_is_told(begin: Open) -> None:
    session = Session()
    session.store = None  # no engine, or one that died
    forecaster = begin(session)
    forecaster.answered("hi", plan("a"), "mine")
    settle(forecaster, 1)
    assert not session.calls


@given(st.lists(st.tuples(st.text(max_size=2), st.floats(0, 1), st.lists(st.text(max_size=2), max_size=100))))
def test_part_is_too_large_or_a_forecast_is_lost(forecasts: list[tuple[str, float, list[str]]]) -> None:
    parts = list(_parts(forecasts))
    assert all(part and sum(len(keys) for *_, keys in part) <= AT_ONCE for part in parts)
    told = [(whose, chance, key) for part in parts for whose, chance, keys in part for key in keys or [None]]
    assert told == [(whose, chance, key) for whose, chance, keys in forecasts for key in keys or [None]]
    assert len(parts) <= 1 + sum(len(keys) for *_, keys in forecasts) // AT_ONCE


def test_policies_that_ignore_forecasts_are_given_some() -> None:
    unlimited, lru = TierSpec(kind="disk", policy="lpc"), TierSpec(kind="ram", bytes=1)
    server = TierSpec(kind="redis", url="redis://localhost")
    assert not wants_forecasts([unlimited, lru, server])
    assert wants_forecasts([lru, TierSpec(kind="ram", bytes=1, policy="lpc")])
    assert wants_forecasts([TierSpec(kind="disk", chunks=1, policy="lpc+"), server])


def test_predictor_runs_for_policies_that_do_not_ask_it(
    tmp_path: Path, settings: Settings, model_dir: Path
) -> None:
    library = Library(tmp_path / "kv", settings.model_copy(update={"model": str(model_dir)}))
    library._look_ahead(running=True)
    assert library.forecaster is None and not predictors()
    library.session.use_policy("lpc")  # no engine runs: the next one is started with it
    assert [spec.policy for spec in library.session.stack] == ["lpc", "lpc"]
    library._look_ahead(running=True)
    assert library.forecaster is not None and len(predictors()) == 1
    library.forecaster.answered("hi", plan("a"), "mine")
    settle(library.forecaster, 1)
    library.use_policy("lru")
    assert library.forecaster is None and not predictors()
    library.session.use_policy("lpc+")
    library._look_ahead(running=True)
    assert library.eviction()["policies"] == {"ram": "lpc+"}  # the disk tier has no limit
    forecasts = library.eviction()["forecasts"]
    assert (forecasts["asked"], forecasts["unanswered"], forecasts["answered"]) == (1, 1, 0)
    library.close()
    assert not predictors()
    library.close()


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("given", ["mine", None])
def test_conversation_of_a_plain_chat_has_another_name_in_its_forecast(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool, given: str | None
) -> None:
    monkeypatch.setenv("BLENDRAG_CACHE_DIR", str(tmp_path / "cache"))
    settings = Settings.load(max_model_len=512, model=str(model_dir), prefix_forecasts=wanted)
    library = Library(tmp_path / "kv", settings)
    engine = SimpleNamespace(blends=True, facts=FACTS, max_model_len=512)
    store = Mock(id="opened")
    monkeypatch.setattr(library.session, "start", lambda progress=None: engine)
    monkeypatch.setattr(EngineSession, "store", store)
    monkeypatch.setattr(library.session, "open", lambda progress=None: store)
    said = [{"role": "user", "content": "How long does it last?"}]
    names = set()
    for answer in ("Eight years.", "Longer."):
        turn = Turn(library, settings, ChatRequest(said, conversation=given))
        names.add(turn.sampling.conversation)
        turn.feed(END)
        said = [*said, {"role": "assistant", "content": answer}, {"role": "user", "content": "Really?"}]
    (name,) = names
    if not wanted:
        assert name is None and library.forecaster is None
        library.close()
        return
    assert library.forecaster is not None and name is not None
    library.forecaster._tell({name: 0.1})
    library.close()
    assert store.forecast.call_args_list == [call([(name, 0.1, [])])]
