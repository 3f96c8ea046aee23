"""From a prompt that was answered to what leaves a store's tiers. The store is real, there is no engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.eviction.fitted import Fitted, fitted_file, save_fitted
from blendrag.forecast.background import BackgroundPredictor
from blendrag.forecast.conversation import Window, conversation_id
from blendrag.forecast.log import PromptLog, log_file
from blendrag.lab.eviction.fit_predictor import Trained
from blendrag.prompt import PromptPlan
from blendrag.prompt.plan import Segment
from blendrag.serving import forecaster as module
from blendrag.serving.forecaster import AT_ONCE, CHUNKS, CONVERSATIONS, Forecaster, _parts, wants_forecasts
from blendrag.serving.library import Library
from blendrag.serving.session import EngineSession
from blendrag.settings import Settings
from blendrag.store.kv_store import KVStore
from blendrag.store.tiers import TierSpec
from stores import A, B, C, D, ask, holds, open_stack, put, register
from word_embedder import WordEmbedder, features, say, settle

LPC = (TierSpec(kind="ram", chunks=3, policy="lpc"), TierSpec(kind="disk", chunks=3, policy="lpc"))


class Session:
    """An engine's session as far as forecaster sees it, over a store in this process."""

    def __init__(self, store: KVStore | None = None, stack: tuple[TierSpec, ...] = LPC) -> None:
        self.store: Session | None = self  # its client
        self.stack = stack
        self.calls: list[list[Any]] = []
        self._store = store

    def forecast(self, forecasts: Any) -> None:
        self.calls.append(forecasts)
        if self._store:
            self._store.policies.forecast(forecasts)


Open = Callable[..., Forecaster]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.load(cache_dir=tmp_path / "cache")


@pytest.fixture
def trained_here(settings: Settings, trained: Trained) -> None:
    save_fitted(fitted_file(settings.cache_dir), Fitted(trained.classifier, trained.embedder))


@pytest.fixture
def begin(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Forecaster with the embedder of words."""
    monkeypatch.setattr(module, "_on_cpu", lambda name: features(WordEmbedder(name)))
    begun: list[Forecaster] = []

    def one(session: Session, **options: Any) -> Forecaster:
        begun.append(Forecaster(session, settings.model_copy(update=options), Path("kb")))  # type: ignore[arg-type]
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
def test_goodbye_gives_up_its_chunks(tmp_path: Path, begin: Open) -> None:
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
def test_conversations_earlier_chunks_are_remembered_behind_the_latest(begin: Open) -> None:
    forecaster = begin(session := Session())
    forecaster.answered("where is the hotel", plan("a", "b", "c"), "mine")
    settle(forecaster, 1)
    forecaster.answered("how much is the room", plan("b", "d"), "mine")
    settle(forecaster, 2)
    (((first, _, some),), ((second, chance, more),)) = session.calls
    assert first == second == conversation_id((), "mine") and 0.0 < chance < 1.0
    assert (some, more) == (["c", "b", "a"], ["d", "b", "c", "a"])


def test_lone_text_or_empty_history_is_no_conversation(begin: Open) -> None:
    forecaster = begin(Session())
    forecaster.answered("where is the hotel", plan("a"), None)
    forecaster.answered([{"role": "system", "content": "Be brief."}], plan("a"), None)
    assert forecaster.counts.asked == 0
    forecaster.answered([{"role": "user", "content": "where"}], plan("a"), None)
    assert forecaster.counts.asked == 1


def test_texts_are_windows_with_what_was_said_before(begin: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    windows: list[Any] = []
    monkeypatch.setattr(BackgroundPredictor, "ask", lambda live, prompt: windows.append(prompt.window))
    forecaster = begin(Session())
    for number in range(7):
        rendered = f"Rules. Document a. Document b.Question {number}?"
        forecaster.answered(rendered, plan("a", "b"), "mine")
    forecaster.answered("x" * 1_000_000, plan("a"), "long")
    forecaster.answered("short", plan("a"), "long")
    assert windows[0] == Window(("Question 0?",), 1)
    assert windows[6] == Window(tuple(f"Question {number}?" for number in range(2, 7)), 7)
    assert len(windows[-1].prompts[0]) < 3000 < len(windows[-2].prompts[0])


def test_memory_does_not_grow_with_conversations_and_chunks(begin: Open) -> None:
    forecaster = begin(Session())
    for number in range(CONVERSATIONS + 50):
        forecaster._noted(f"c{number}", [f"k{number}"], "hi")
    forecaster._noted("long", map(str, range(CHUNKS + 50)), "hi")
    assert len(forecaster._conversations) == CONVERSATIONS and "c0" not in forecaster._conversations
    assert list(forecaster._conversations["long"].chunks) == [str(key) for key in range(50, CHUNKS + 50)]


def test_missing_predictor_is_told_of_once_and_counted(begin: Open, caplog: pytest.LogCaptureFixture) -> None:
    forecaster = begin(session := Session())
    for number in range(3):
        forecaster.answered([{"role": "user", "content": "hi"}], plan("a"), None)
        settle(forecaster, number + 1)
    assert forecaster.counts.unanswered == 3 and "blendrag fit" in forecaster.counts.reason
    assert len([record for record in caplog.records if "as LRU" in record.message]) == 1
    assert not session.calls


@pytest.mark.usefixtures("trained_here")
def test_damaged_weights_are_not_used(begin: Open, settings: Settings) -> None:
    weights = fitted_file(settings.cache_dir)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    session = Session()
    forecaster = begin(session)
    forecaster.answered([{"role": "user", "content": "hi"}], plan("a"), None)
    settle(forecaster, 1)
    assert "damaged" in forecaster.counts.reason and not session.calls


@pytest.mark.parametrize("table_alone", [False, True])
def test_outcomes_are_logged_before_there_is_a_predictor(
    begin: Open, settings: Settings, table_alone: bool
) -> None:
    """Under LRU, too: there has to be something to fit it to first."""
    if table_alone:
        save_fitted(fitted_file(settings.cache_dir), Fitted())
    session = Session(stack=(TierSpec(kind="ram", chunks=3),))
    forecaster = begin(session, outcome_log=True, embedder="words")
    for number in range(3):
        forecaster.answered("hi", plan("a"), "mine", 10.0)
        settle(forecaster, number + 1)
    forecaster.close()
    log = PromptLog(log_file(settings.cache_dir))
    say(log, features(), ("later", time.time() + 1e6))
    assert log.outcomes("words").continues.tolist() == [True, True, False]
    assert len(log.prompts()) == 3 and abs(log.prompts()[0].at - time.time() + 10.0) < 60.0
    assert not session.calls


def test_nothing_is_logged_without_being_asked_for(begin: Open, settings: Settings) -> None:
    forecaster = begin(Session())
    forecaster.answered("hi", plan("a"), "mine")
    forecaster.answered("hi", plan("a"), None)
    settle(forecaster, 1)
    forecaster.close()
    assert not log_file(settings.cache_dir).exists()


@pytest.mark.usefixtures("trained_here")
def test_store_that_is_not_open_is_not_told(begin: Open) -> None:
    session = Session()
    session.store = None  # no engine, or one that died
    forecaster = begin(session)
    forecaster.answered("hi", plan("a"), "mine")
    settle(forecaster, 1)
    assert not session.calls


@given(st.lists(st.tuples(st.text(max_size=2), st.floats(0, 1), st.lists(st.text(max_size=2), max_size=100))))
def test_no_part_is_too_large_and_no_forecast_is_lost(forecasts: list[tuple[str, float, list[str]]]) -> None:
    parts = list(_parts(forecasts))
    assert all(part and sum(len(keys) for *_, keys in part) <= AT_ONCE for part in parts)
    told = [(whose, chance, key) for part in parts for whose, chance, keys in part for key in keys]
    assert told == [(whose, chance, key) for whose, chance, keys in forecasts for key in keys]
    assert len(parts) <= 1 + sum(len(keys) for *_, keys in forecasts) // AT_ONCE


def test_policies_that_ignore_forecasts_are_given_none() -> None:
    unlimited, lru = TierSpec(kind="disk", policy="lpc"), TierSpec(kind="ram", bytes=1)
    server = TierSpec(kind="redis", url="redis://localhost")
    assert not wants_forecasts([unlimited, lru, server])
    assert wants_forecasts([lru, TierSpec(kind="ram", bytes=1, policy="lpc")])
    assert wants_forecasts([TierSpec(kind="disk", chunks=1, policy="lpc+"), server])


@pytest.mark.parametrize("policy", ["gdsf", "lpc", "lpc+"])
def test_predictor_runs_beside_an_engine_for_policies_that_ask_it(
    tmp_path: Path, settings: Settings, model_dir: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    tiers = TierSpec(kind="ram", bytes=1 << 20, policy=policy), TierSpec(kind="disk", policy=policy)
    own = settings.model_copy(update={"model": str(model_dir), "tiers": tiers})
    library = Library(tmp_path / "kv", own)
    library.sidecars._forecast()
    assert library.sidecars.forecaster is None and not predictors(), "no engine runs"
    monkeypatch.setattr(EngineSession, "store", Session())
    library.sidecars._forecast()
    assert library.eviction()["policies"] == {"ram": policy}  # the disk tier has no limit
    if policy == "gdsf":
        assert library.sidecars.forecaster is None and not predictors()
    else:
        assert library.sidecars.forecaster is not None and len(predictors()) == 1
        library.sidecars.forecaster.answered("hi", plan("a"), "mine")
        settle(library.sidecars.forecaster, 1)
    library.close()
    assert not predictors()
    library.sidecars._forecast()
    assert library.sidecars.forecaster is None
    again = Library(tmp_path / "kv", own)
    forecasts = again.eviction()["forecasts"]
    asked = int(policy != "gdsf")
    assert (forecasts["asked"], forecasts["unanswered"], forecasts["answered"]) == (asked, asked, 0)
    again.close()
