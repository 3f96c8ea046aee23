"""The classifier: what it learns, what it must not see, and that its odds are right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from blendrag.errors import ConfigError, PredictorError
from blendrag.forecast.classifier import Classifier, shapes
from blendrag.forecast.features import SCALARS
from blendrag.forecast.predictor import Predictor
from blendrag.forecast.window import Window
from blendrag.lab.training import study
from blendrag.lab.training.metrics import TurnsOnly, auc
from blendrag.lab.training.study import Trained, evaluate_on_file, train_on_file
from blendrag.lab.training.training import Examples, fit
from word_embedder import WordEmbedder, features, write_dialogs


def drawn(count: int, rate: float, seed: int = 0) -> Examples:
    """Outcomes that follow from the last column, at ``rate`` on average."""
    random = np.random.default_rng(seed)
    rows = random.normal(size=(count, 4 + len(SCALARS))).astype(np.float32)
    chance = 1 / (1 + np.exp(-(rows[:, -1] + np.log(rate / (1 - rate)))))
    return Examples(rows, random.random(count) < chance, [str(each) for each in range(count)])


@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_weight_of_the_rarer_outcome_does_not_bias_the_odds(rate: float) -> None:
    known = drawn(3000, rate)
    fitted = fit(known, drawn(800, rate, 1), np.arange(7), seed=0)
    test = drawn(3000, rate, 2)
    probability = fitted.classifier.probability(test.rows)
    assert probability.mean() == pytest.approx(test.continues.mean(), abs=0.04)
    assert auc(test.continues, probability) > 0.65
    # It still says both things: the weight's doing.
    assert 0.2 < (probability >= fitted.threshold).mean() < 0.8


def test_best_epoch_is_kept_and_not_the_last() -> None:
    valid = drawn(200, 0.5, 1)
    fitted = fit(drawn(100, 0.5), valid, np.arange(7), seed=0)
    probability = fitted.classifier.probability(valid.rows)
    loss = -np.mean(np.log(np.where(valid.continues, probability, 1 - probability)))
    assert loss == pytest.approx(min(fitted.losses)) and fitted.loss == min(fitted.losses)


def test_seed_decides_everything() -> None:
    known, valid = drawn(200, 0.5), drawn(100, 0.5, 1)
    first, again, other = (fit(known, valid, np.arange(7), seed).losses for seed in (3, 3, 4))
    assert first == again != other


def test_numpy_computes_what_torch_trained() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(into, out) for (out, into), _ in shapes(5)]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    copied = tuple((layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in layers)
    mean, scale = np.full(5, 0.5, np.float32), np.full(5, 2.0, np.float32)
    rows = np.random.default_rng(0).normal(size=(9, 8)).astype(np.float32)
    columns = np.array([0, 2, 3, 5, 7])
    with torch.no_grad():
        wanted = model(torch.from_numpy((rows[:, columns] - mean) / scale))[:, 0].numpy()
    assert np.allclose(Classifier(columns, mean, scale, copied).logits(rows), wanted, atol=1e-5)


def test_conversation_is_never_in_both_parts() -> None:
    known = drawn(1000, 0.5)
    known = Examples(known.rows, known.continues, [str(number // 5) for number in range(1000)])
    rest, taken = known.split(0.3, 0, "x")
    assert not set(rest.dialogs) & set(taken.dialogs)
    assert len(rest.dialogs) + len(taken.dialogs) == 1000 and 200 < len(taken.dialogs) < 400


def test_what_conversations_end_with_is_learned(trained: Trained) -> None:
    metrics = trained.manifest.metrics
    assert metrics["lpc"]["auc"] > 0.85 and metrics["lpc"]["mcc"] > 0.6
    assert metrics["lpc"]["auc"] > metrics["turns_only"]["auc"] + 0.1


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
    assert results["held_out_only"]
    assert results["conversations"] == trained.manifest.metrics["conversations"] < 60
    assert results["lpc"]["auc"] == pytest.approx(trained.manifest.metrics["lpc"]["auc"])
    other = evaluate_on_file(write_dialogs(tmp_path / "other.jsonl", count=30), predictor)
    assert not other["held_out_only"] and other["conversations"] == 30
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
    real = study.fit

    def spy(part: Examples, valid: Examples, columns: np.ndarray, seed: int) -> object:  # type: ignore[type-arg]
        fitted = real(part, valid, columns, seed)
        tried.append((fitted.loss, len(columns)))
        return fitted

    monkeypatch.setattr(study, "fit", spy)
    made = train_on_file(write_dialogs(tmp_path / "d.jsonl", 60), features())
    assert len(tried) == 2 and len(made.classifier.columns) == min(tried)[1]


def test_turns_that_were_never_seen_do_not_break_turns_only() -> None:
    turns = TurnsOnly.of(np.array([1, 1, 4]), np.array([True, False, False]))
    assert turns.probability(np.array([0, 1, 2, 3, 4, 900])).tolist() == [0.5, 0.5, 0.5, 0.5, 0.0, 0.0]
    assert turns.quality(np.array([1, 4]), np.array([True, True])).log_loss < 10
