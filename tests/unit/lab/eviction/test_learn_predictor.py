"""A predictor learns from conversations and from their log, and does not take a better one's place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.errors import ConfigError, PredictorError
from blendrag.forecast.classifier import MANIFEST, Classifier
from blendrag.forecast.conversation import PROMPTS, Window
from blendrag.forecast.features import Features
from blendrag.forecast.outcome_log import ENDED_AFTER_S, OutcomeLog
from blendrag.forecast.predictor import Predictor
from blendrag.lab.eviction import learn_predictor
from blendrag.lab.eviction.fit_classifier import Examples
from blendrag.lab.eviction.learn_predictor import Trained, evaluate_on_file, examples, relearn, train_on_file
from blendrag.lab.eviction.readers import Dialog, DialogTurn
from word_embedder import WordEmbedder, features, say, write_dialogs

pytestmark = pytest.mark.slow

NAME = "words"  # of the embedder
LATER = 3 * ENDED_AFTER_S


def test_what_conversations_end_with_is_learned(trained: Trained) -> None:
    metrics = trained.manifest.metrics
    assert metrics and metrics.lpc.auc > 0.85 and metrics.lpc.calibration_error < 0.15


@pytest.mark.parametrize("turns", [0, 1])
def test_one_sided_conversations_teach_nothing_and_say_so(tmp_path: Path, turns: int) -> None:
    turn = '{"role": "user", "text": "hi"}'
    lines = (f'{{"id": "{number}", "turns": [{turn if turns else ""}]}}\n' for number in range(50))
    (tmp_path / "one.jsonl").write_text("".join(lines))
    with pytest.raises(PredictorError, match=r"both outcomes|in none"):
        train_on_file(tmp_path / "one.jsonl", features())


def test_file_is_not_judged_by_what_was_trained_on(tmp_path: Path, trained: Trained) -> None:
    predictor = Predictor(features(), trained.classifier, trained.manifest)
    own = write_dialogs(tmp_path / "again.jsonl")
    results = evaluate_on_file(own, predictor)
    assert results.held_out_only and trained.manifest.metrics
    assert results.metrics.conversations == trained.manifest.metrics.conversations < 60
    assert results.metrics.lpc.auc == pytest.approx(trained.manifest.metrics.lpc.auc)
    other = evaluate_on_file(write_dialogs(tmp_path / "other.jsonl", count=30), predictor)
    assert not other.held_out_only and other.metrics.conversations == 30
    whole = Predictor(features(), trained.classifier, trained.manifest.model_copy(update={"held_out": 0.0}))
    with pytest.raises(ConfigError, match="all of it"):
        evaluate_on_file(own, whole)


def test_embedder_that_changed_under_its_name_is_refused(trained: Trained) -> None:
    other = Predictor(features(embedder=WordEmbedder(width=5)), trained.classifier, trained.manifest)
    with pytest.raises(PredictorError, match="numbers"):
        other.probability([Window.of(["hi"])])


def test_nothing_to_forecast_loads_nothing(trained: Trained) -> None:
    assert len(Predictor(None, trained.classifier, trained.manifest).probability([])) == 0  # type: ignore[arg-type]


def test_lengths_are_read_only_where_they_help(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried = []
    real = learn_predictor.fit

    def spy(part: Examples, valid: Examples, columns: np.ndarray, seed: int) -> object:  # type: ignore[type-arg]
        fitted = real(part, valid, columns, seed)
        tried.append((fitted.loss, len(columns)))
        return fitted

    monkeypatch.setattr(learn_predictor, "fit", spy)
    made = train_on_file(write_dialogs(tmp_path / "d.jsonl", 60), features())
    assert len(tried) == 2 and len(made.classifier.columns) == min(tried)[1]


def filled(folder: Path, made: Features, count: int, ending: str) -> OutcomeLog:
    """Conversations of two prompts, one after the other; the second is ``ending``."""
    log = OutcomeLog(folder, NAME)
    for number in range(count):
        at = number * 10.0
        log.record(
            [f"c{number}"] * 2,
            [at, at + 1],
            made.rows([Window((f"where is {number}",), 1), Window((f"where is {number}", ending), 2)]),
        )
    say(log, made, ("last", count * 10 + LATER))
    return log


def test_empty_and_one_turn_logs_teach_nothing_and_say_so(tmp_path: Path) -> None:
    made = features()
    log = OutcomeLog(tmp_path, NAME)
    untrained = Predictor(made, None)
    with pytest.raises(PredictorError, match="no outcomes yet"):
        relearn(log, untrained, tmp_path)
    say(log, made, *((f"c{number}", number * LATER) for number in range(60)))
    with pytest.raises(PredictorError, match="too few"):
        relearn(log, untrained, tmp_path)
    assert not (tmp_path / MANIFEST).exists()


def test_identical_prompts_do_not_stop_learning(tmp_path: Path) -> None:
    made = features()
    log = OutcomeLog(tmp_path, NAME)
    rows = np.repeat(made.rows([Window(("hi",), 1)]), 1_000, axis=0)
    log.record([str(number % 450) for number in range(1_000)], [0.0] * 1_000, rows)
    say(log, made, ("last", LATER))
    compared = relearn(log, Predictor(made, None), tmp_path)
    assert np.isfinite(compared.new_loss)


def test_predictor_goes_live_only_if_it_is_better(tmp_path: Path) -> None:
    made = features()
    log = filled(tmp_path, made, 150, "thanks bye")
    first = relearn(log, Predictor(made, None), tmp_path)
    assert first.live and first.new_loss < first.old_loss
    kept = (tmp_path / MANIFEST).read_bytes()
    loaded = Predictor.load(tmp_path, made.embedder)
    assert (loaded.classifier.logits(log.outcomes().rows) < 0).any()  # type: ignore[union-attr]

    again = relearn(log, loaded, tmp_path)
    assert not again.live and again.new_loss >= again.old_loss
    assert (tmp_path / MANIFEST).read_bytes() == kept

    old = first.trained.classifier
    weight, bias = old.layers[-1]
    wrong = Classifier(old.columns, old.mean, old.scale, (*old.layers[:-1], (-weight, -bias)))
    better = relearn(log, Predictor(made, wrong, first.trained.manifest), tmp_path)
    assert better.live and better.new_loss < better.old_loss


ROLES = st.sampled_from(["user", "assistant", "system"])


@given(st.lists(st.tuples(ROLES, st.text(max_size=3)), max_size=20))
def test_outcome_never_shows_in_what_is_known(turns: list[tuple[str, str]]) -> None:
    said = tuple(DialogTurn(role=role, text=text) for role, text in turns)
    prompts = [text for role, text in turns if role == "user"]
    found = list(examples([Dialog(id="a", turns=said)]))
    assert [each.continues for each in found] == [True] * (len(prompts) - 1) + [False] * bool(prompts)
    for number, each in enumerate(found, start=1):
        assert each.window.turns == number
        assert list(each.window.prompts) == prompts[max(0, number - PROMPTS) : number]
