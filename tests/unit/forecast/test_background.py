"""Beside the engine: nobody waits, nothing is lost uncounted, no failure ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from blendrag.errors import PredictorError
from blendrag.forecast.background import BATCH, BackgroundPredictor, Heard
from blendrag.forecast.conversation import Window
from blendrag.forecast.outcome_log import OutcomeLog
from blendrag.forecast.predictor import Predictor
from blendrag.lab.eviction.learn_predictor import Trained
from word_embedder import WAIT_S, WordEmbedder, features, settle

WINDOW = Window.of(["how much"])


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
    load: Callable[[], Predictor],
    heard: Heard,
    log: Callable[[Predictor], OutcomeLog] | None = None,
    capacity: int = 256,
) -> Iterator[BackgroundPredictor]:
    made = BackgroundPredictor(load, heard, log=log, clock=lambda: 0.0, capacity=capacity)
    try:
        yield made
    finally:
        made.close(WAIT_S)


def test_full_queue_drops_and_never_waits(trained: Trained) -> None:
    gate, answers = Gate(), Answers()
    load = lambda: Predictor(features(embedder=gate), trained.classifier, trained.manifest)  # noqa: E731
    with live(load, answers, capacity=8) as predictor:
        predictor.ask("first", WINDOW)
        assert gate.entered.wait(WAIT_S)
        taken = [predictor.ask(str(number), WINDOW) for number in range(50)]  # would hang here if it waited
        assert taken == [True] * 8 + [False] * 42
        gate.opened.set()
        settle(predictor, 51)
        counts = predictor.counts
    assert (counts.asked, counts.answered, counts.dropped, counts.unanswered) == (51, 9, 42, 0)
    assert len(answers.heard) == 9


def test_waiting_requests_are_answered_together(trained: Trained) -> None:
    gate, answers = Gate(), Answers()
    load = lambda: Predictor(features(embedder=gate), trained.classifier, trained.manifest)  # noqa: E731
    with live(load, answers) as predictor:
        predictor.ask("first", WINDOW)
        assert gate.entered.wait(WAIT_S)
        for number in range(BATCH - 1):
            predictor.ask(f"c{number}", Window.of([f"prompt {number}"]))
        predictor.ask("c0", Window.of(["prompt 0", "thanks bye"]))  # the same conversation, and further
        gate.opened.set()
        answers.wait(BATCH)
        settle(predictor, BATCH + 1)
        assert gate.calls == 2 and predictor.counts.answered == BATCH + 1
    said = dict(answers.heard)
    assert len(answers.heard) == len(said) == BATCH
    direct = load().probability([Window.of(["prompt 0", "thanks bye"])])
    assert said["c0"] == pytest.approx(direct[0], abs=1e-6)


def test_flood_of_one_prompt_is_embedded_again_or_not_counted(trained: Trained) -> None:
    """200,000 of them, by fifty conversations, faster than anybody answers."""
    words, answers = WordEmbedder(), Answers()
    load = lambda: Predictor(features(embedder=words), trained.classifier, trained.manifest)  # noqa: E731
    with live(load, answers) as predictor:
        for number in range(200_000):
            predictor.ask(f"c{number % 50}", WINDOW)
        assert predictor._queue.qsize() <= 256
        settle(predictor, 200_000)
        counts = predictor.counts
    assert counts.asked == counts.answered + counts.dropped == 200_000 and not counts.unanswered
    assert words.texts == ["how much"]
    assert {whose for whose, _ in answers.heard} <= {f"c{number}" for number in range(50)}


@pytest.mark.parametrize("at", [-1e9, float("nan"), float("inf")])
def test_clock_that_is_wrong_silences_forecasts(tmp_path: Path, trained: Trained, at: float) -> None:
    answers, times = Answers(), iter([5.0, at, 3.0])
    predictor = BackgroundPredictor(
        lambda: Predictor(features(), trained.classifier, trained.manifest),
        answers,
        log=lambda predictor: OutcomeLog(tmp_path, predictor.features.embedder.name),
        clock=lambda: next(times),
    )
    for number in range(1, 4):
        predictor.ask("a", WINDOW)
        settle(predictor, number)
    predictor.close(WAIT_S)
    assert len(answers.heard) == predictor.counts.answered == 3
    assert OutcomeLog(tmp_path, "words").count() == (2 if at != at else 3)


def test_missing_predictor_is_counted_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers = Answers()
    with live(lambda: Predictor.load(tmp_path), answers) as predictor:
        for _ in range(5):
            predictor.ask("a", WINDOW)
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

    load = lambda: Predictor(features(embedder=Failing()), trained.classifier, trained.manifest)  # noqa: E731
    with live(load, heard) as predictor:
        for number, (conversation, prompt) in enumerate([("bad", "x"), ("a", "broken"), ("good", "x")], 1):
            predictor.ask(conversation, Window.of([prompt]))
            settle(predictor, number)
        assert predictor.counts.unanswered == 2 and predictor.counts.answered == 1
    assert [conversation for conversation, _ in answers.heard] == ["good"]


def test_log_is_filled_before_there_is_a_predictor(tmp_path: Path) -> None:
    made = features()
    answers = Answers()
    opened = lambda predictor: OutcomeLog(tmp_path, predictor.features.embedder.name)  # noqa: E731
    with live(lambda: Predictor.or_untrained(tmp_path, made), answers, opened) as predictor:
        for number in range(20):
            predictor.ask(f"c{number}", Window.of([] if number % 2 else ["hi"]))
        settle(predictor, 20)
    assert OutcomeLog(tmp_path, "words").count() == 20
    assert not answers.heard and predictor.counts.unanswered == 20


def test_log_that_fails_does_not_silence_forecasts(tmp_path: Path, trained: Trained) -> None:
    answers = Answers()

    def refused(predictor: Predictor) -> OutcomeLog:
        raise PredictorError("cannot log")

    load = lambda: Predictor(features(), trained.classifier, trained.manifest)  # noqa: E731
    with live(load, answers, refused) as predictor:
        predictor.ask("a", WINDOW)
        answers.wait(1)
        assert predictor.counts.reason == "cannot log"


def test_other_threads_compute_on_one_processor_or_the_predictor_on_all(trained: Trained) -> None:
    class Noting(WordEmbedder):
        def embed(self, texts: Sequence[str]) -> list[list[float]]:
            threads.append(torch.get_num_threads())
            return super().embed(texts)

    threads: list[int] = []
    usual, answers = torch.get_num_threads(), Answers()
    torch.set_num_threads(3)
    try:
        load = lambda: Predictor(features(embedder=Noting()), trained.classifier, trained.manifest)  # noqa: E731
        with live(load, answers) as predictor:
            predictor.ask("a", WINDOW)
            answers.wait(1)
            new = threading.Thread(target=lambda: threads.append(torch.get_num_threads()))
            new.start()
            new.join()
            threads.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(usual)
    assert threads == [1, 3, 3]


def test_closing_ends_the_thread(trained: Trained) -> None:
    predictor = BackgroundPredictor(
        lambda: Predictor(features(), trained.classifier, trained.manifest), Answers()
    )
    predictor.close(WAIT_S)
    assert not predictor._thread.is_alive()
    predictor.close(WAIT_S)
