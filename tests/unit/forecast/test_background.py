"""Beside the engine: nobody waits, nothing is lost uncounted, no failure ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from blendrag.errors import PredictorError
from blendrag.forecast.background import BATCH, BackgroundPredictor, Heard, Predictor, Record
from blendrag.forecast.conversation import Window
from blendrag.forecast.log import Prompt, PromptLog
from blendrag.lab.eviction.fit_predictor import Trained
from word_embedder import WAIT_S, WordEmbedder, features, settle

WINDOW = Window.of(["how much"])


def said(conversation: str, window: Window = WINDOW, at: float = 0.0) -> Prompt:
    return Prompt(at, (("chunk", 100),), conversation, window)


def into(log: PromptLog) -> Callable[[Predictor | None], Record]:
    return lambda predictor: partial(log.record, "store", embedder="words")


def logged(path: Path) -> int:
    return len(PromptLog(path).prompts())


class Gate(WordEmbedder):
    """Embeds only when it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.opened = threading.Event(), threading.Event()
        self.calls = 0

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        self.calls += 1
        self.entered.set()
        assert self.opened.wait(WAIT_S)
        return super().embed(texts)


class Answers:
    """What was heard; ``wait`` until there are so many answers."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, float]] = []
        self._changed = threading.Condition()

    def __call__(self, chances: Mapping[str, float]) -> None:
        with self._changed:
            self.heard += chances.items()
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.heard) >= count, WAIT_S)


@contextmanager
def live(
    fitted: Trained | Callable[[], Predictor],
    heard: Heard,
    embedder: WordEmbedder | None = None,
    record: Callable[[Predictor | None], Record] | None = None,
    capacity: int = 256,
) -> Iterator[BackgroundPredictor]:
    beside = features(embedder)
    load = partial(Predictor, beside, fitted.classifier) if isinstance(fitted, Trained) else fitted
    made = BackgroundPredictor(load, heard, record, capacity=capacity)
    try:
        yield made
    finally:
        made.close(WAIT_S)


def test_full_queue_drops_and_never_waits(trained: Trained) -> None:
    gate, answers = Gate(), Answers()
    with live(trained, answers, gate, capacity=8) as predictor:
        predictor.ask(said("first"))
        assert gate.entered.wait(WAIT_S)
        taken = [predictor.ask(said(str(number))) for number in range(50)]  # would hang here if it waited
        assert taken == [True] * 8 + [False] * 42
        gate.opened.set()
        settle(predictor, 51)
        counts = predictor.counts
    assert (counts.asked, counts.answered, counts.dropped, counts.unanswered) == (51, 9, 42, 0)
    assert len(answers.heard) == 9


def test_waiting_requests_are_answered_together(trained: Trained) -> None:
    gate, answers = Gate(), Answers()
    with live(trained, answers, gate) as predictor:
        predictor.ask(said("first"))
        assert gate.entered.wait(WAIT_S)
        for number in range(BATCH - 1):
            predictor.ask(said(f"c{number}", Window.of([f"prompt {number}"])))
        predictor.ask(said("c0", Window.of(["prompt 0", "thanks bye"])))  # the same conversation, and further
        gate.opened.set()
        answers.wait(BATCH)
        settle(predictor, BATCH + 1)
        assert gate.calls == 2 and predictor.counts.answered == BATCH + 1
    told = dict(answers.heard)
    assert len(answers.heard) == len(told) == BATCH
    rows = features().rows([Window.of(["prompt 0", "thanks bye"])])
    direct = trained.classifier.probability(rows)
    assert told["c0"] == pytest.approx(direct[0], abs=1e-6)


def test_flood_of_one_prompt_is_embedded_once_and_counted(trained: Trained) -> None:
    """200,000 of them, by fifty conversations, faster than anybody answers."""
    words, answers = WordEmbedder(), Answers()
    with live(trained, answers, words) as predictor:
        for number in range(200_000):
            predictor.ask(said(f"c{number % 50}"))
        assert predictor._queue.qsize() <= 256
        settle(predictor, 200_000)
        counts = predictor.counts
    assert counts.asked == counts.answered + counts.dropped == 200_000 and not counts.unanswered
    assert words.texts == ["how much"]
    assert {whose for whose, _ in answers.heard} <= {f"c{number}" for number in range(50)}


@pytest.mark.parametrize("at", [-1e9, float("nan"), float("inf")])
def test_clock_that_is_wrong_leaves_forecasts_going(tmp_path: Path, trained: Trained, at: float) -> None:
    answers, path = Answers(), tmp_path / "log.sqlite"
    with live(trained, answers, record=into(PromptLog(path))) as predictor:
        for number, when in enumerate((5.0, at, 3.0), 1):
            predictor.ask(said("a", at=when))
            settle(predictor, number)
        assert len(answers.heard) == predictor.counts.answered == 3
    assert logged(path) == (2 if at != at else 3)


def test_missing_predictor_is_counted_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers = Answers()
    with live(lambda: Predictor.load(tmp_path / "none", lambda embedder: features()), answers) as predictor:
        for _ in range(5):
            predictor.ask(said("a"))
        settle(predictor, 5)
        assert predictor.counts.unanswered == 5 and "no predictor" in predictor.counts.reason
    assert not answers.heard
    assert [record.message for record in caplog.records if "as LRU" in record.message] == [
        f"no forecasts, eviction as LRU: {predictor.counts.reason}"
    ]


def test_failing_listener_or_embedder_does_not_end_the_thread(trained: Trained) -> None:
    answers = Answers()

    def heard(chances: Mapping[str, float]) -> None:
        if "bad" in chances:
            raise RuntimeError("listener")
        answers(chances)

    class Failing(WordEmbedder):
        def embed(self, texts: Sequence[str]) -> list[list[float]]:
            if "broken" in texts:
                raise MemoryError
            return super().embed(texts)

    with live(trained, heard, Failing()) as predictor:
        for number, (conversation, prompt) in enumerate([("bad", "x"), ("a", "broken"), ("good", "x")], 1):
            predictor.ask(said(conversation, Window.of([prompt])))
            settle(predictor, number)
        assert predictor.counts.unanswered == 2 and predictor.counts.answered == 1
    assert [conversation for conversation, _ in answers.heard] == ["good"]


def test_log_is_filled_before_there_is_a_predictor(tmp_path: Path) -> None:
    answers, path = Answers(), tmp_path / "log.sqlite"
    with live(lambda: Predictor(features(), None), answers, record=into(PromptLog(path))) as predictor:
        for number in range(20):
            predictor.ask(said(f"c{number}", Window.of([] if number % 2 else ["hi"])))
        settle(predictor, 20)
    assert logged(path) == 20
    assert not answers.heard and predictor.counts.unanswered == 20


def test_prompts_are_logged_without_an_embedder_and_without_a_conversation(tmp_path: Path) -> None:
    def missing() -> Predictor:
        raise PredictorError("no embedder")

    path = tmp_path / "log.sqlite"
    with live(missing, Answers(), record=into(PromptLog(path))) as predictor:
        predictor.ask(said("a"))
        predictor.ask(Prompt(0.0, (("chunk", 100),)))
        settle(predictor, 1)
        assert predictor.counts.asked == predictor.counts.unanswered == 1
    assert logged(path) == 2


def test_what_waits_when_it_is_closed_is_logged_and_not_answered(tmp_path: Path, trained: Trained) -> None:
    gate, answers, path = Gate(), Answers(), tmp_path / "log.sqlite"
    with live(trained, answers, gate, into(PromptLog(path))) as predictor:
        predictor.ask(said("first"))
        assert gate.entered.wait(WAIT_S)
        for number in range(5):
            predictor.ask(said(str(number)))
        threading.Timer(0.1, gate.opened.set).start()
    assert logged(path) == 6 and [whose for whose, _ in answers.heard] == ["first"]


def test_log_that_fails_leaves_forecasts_going(trained: Trained, caplog: pytest.LogCaptureFixture) -> None:
    answers = Answers()

    def refused(predictor: Predictor | None) -> Record:
        raise PredictorError("cannot log")

    with live(trained, answers, record=refused) as predictor:
        predictor.ask(said("a"))
        answers.wait(1)
        assert predictor.counts.reason == "cannot log"
    assert "prompts are not logged: cannot log" in caplog.text


def test_predictor_computes_on_one_processor_and_other_threads_on_all(trained: Trained) -> None:
    class Noting(WordEmbedder):
        def embed(self, texts: Sequence[str]) -> list[list[float]]:
            threads.append(torch.get_num_threads())
            return super().embed(texts)

    threads: list[int] = []
    usual, answers = torch.get_num_threads(), Answers()
    torch.set_num_threads(3)
    try:
        with live(trained, answers, Noting()) as predictor:
            predictor.ask(said("a"))
            answers.wait(1)
            new = threading.Thread(target=lambda: threads.append(torch.get_num_threads()))
            new.start()
            new.join()
            threads.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(usual)
    assert threads == [1, 3, 3]


def test_closing_ends_the_thread(trained: Trained) -> None:
    with live(trained, Answers()) as predictor:
        predictor.close(WAIT_S)
        assert not predictor._thread.is_alive()
