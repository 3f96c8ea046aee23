"""The predictor of ``lpc``: what it learns from conversations and from a log, and that its odds are right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendrag.errors import PredictorError, SourceError
from blendrag.eviction.classifier import Classifier
from blendrag.forecast.conversation import PROMPTS, Window
from blendrag.forecast.features import Features
from blendrag.forecast.log import ENDED_AFTER_S, Outcomes, Prompt, PromptLog
from blendrag.lab.eviction.fit_predictor import (
    Trained,
    examples,
    fit,
    log_loss,
    split,
    train_on_file,
    train_on_log,
    unseen,
)
from blendrag.lab.eviction.trace import Dialog, DialogTurn, read_dialogs
from word_embedder import features, say, write_dialogs

NAME = "words"  # of the embedder
LATER = 3 * ENDED_AFTER_S


def test_what_conversations_end_with_is_learned(trained: Trained) -> None:
    found = trained.quality
    assert found and found.log_loss < 0.7 * found.base and trained.helps
    windows = [Window.of(["how much"]), Window.of(["how much", "thanks bye"])]
    goes_on, ends = trained.classifier.probability(features().rows(windows))
    assert goes_on > ends + 0.2


@pytest.mark.parametrize("turns", [0, 1])
def test_one_sided_conversations_teach_nothing_and_say_so(tmp_path: Path, turns: int) -> None:
    turn = '{"role": "user", "text": "hi"}'
    lines = (f'{{"id": "{number}", "turns": [{turn if turns else ""}]}}\n' for number in range(50))
    (tmp_path / "one.jsonl").write_text("".join(lines))
    with pytest.raises((PredictorError, SourceError), match=r"both outcomes|in none"):
        train_on_file(tmp_path / "one.jsonl", features())


def test_what_was_held_out_is_known_again(tmp_path: Path, trained: Trained) -> None:
    own = read_dialogs(write_dialogs(tmp_path / "again.jsonl"))
    assert trained.quality is not None
    assert len(unseen(own, trained.facts)) == trained.quality.conversations < 60
    other = read_dialogs(write_dialogs(tmp_path / "other.jsonl", count=30))
    assert unseen(other, trained.facts) == other == unseen(other, {})
    whole = train_on_file(tmp_path / "again.jsonl", features(), held_out=0.0)
    assert whole.quality is None and not whole.helps and not unseen(own, whole.facts)


def filled(folder: Path, made: Features, count: int, ending: str) -> PromptLog:
    """Conversations of two prompts, one after the other; the second is ``ending``."""
    log = PromptLog(folder / "log.sqlite")
    for number in range(count):
        said = (f"where is {number}", ending)
        windows = [Window(said[:1], 1), Window(said, 2)]
        prompts = [Prompt(number * 10.0 + n, (), f"c{number}", window) for n, window in enumerate(windows)]
        log.record("store", prompts, list(made.rows(windows)), NAME)
    say(log, made, ("last", count * 10 + LATER))
    return log


def test_empty_and_one_turn_logs_teach_nothing_and_say_so(tmp_path: Path) -> None:
    log = PromptLog(tmp_path / "log.sqlite")
    with pytest.raises(PredictorError, match="no outcomes yet"):
        train_on_log(log, NAME)
    say(log, features(), *((f"c{number}", number * LATER) for number in range(60)))
    with pytest.raises(PredictorError, match="too little"):
        train_on_log(log, NAME)


def test_identical_prompts_do_not_stop_learning(tmp_path: Path) -> None:
    log = PromptLog(tmp_path / "log.sqlite")
    say(log, features(), *((str(number % 450), 0.0) for number in range(1_000)), ("last", LATER))
    found = train_on_log(log, NAME).quality
    assert found is not None and np.isfinite(found.log_loss)


def test_log_is_learned_from_and_measured_on_its_latest_part(tmp_path: Path) -> None:
    trained = train_on_log(filled(tmp_path, features(), 150, "thanks bye"), NAME)
    assert trained.helps and trained.quality is not None
    assert 25 <= trained.quality.conversations <= 35 and trained.facts["conversations"] >= 115
    assert trained.embedder == NAME and "digest" not in trained.facts


ROLES = st.sampled_from(["user", "assistant", "system"])


@given(st.lists(st.tuples(ROLES, st.text(max_size=3)), max_size=20))
def test_outcome_never_shows_in_what_is_known(turns: list[tuple[str, str]]) -> None:
    said = tuple(DialogTurn(role=role, text=text) for role, text in turns)
    prompts = [text for role, text in turns if role == "user"]
    found = list(examples([Dialog(id="a", turns=said)]))
    assert [on for _, on, _ in found] == [True] * (len(prompts) - 1) + [False] * bool(prompts)
    for number, (window, _, _) in enumerate(found, start=1):
        assert window.turns == number
        assert list(window.prompts) == prompts[max(0, number - PROMPTS) : number]


def drawn(count: int, rate: float, seed: int = 0) -> Outcomes:
    """Outcomes that follow from the last column, at ``rate`` on average."""
    random = np.random.default_rng(seed)
    rows = random.normal(size=(count, 7)).astype(np.float32)
    chance = 1 / (1 + np.exp(-(rows[:, -1] + np.log(rate / (1 - rate)))))
    return Outcomes(rows, random.random(count) < chance, [str(each) for each in range(count)])


@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_weight_of_the_rarer_outcome_does_not_bias_the_odds(rate: float) -> None:
    known = drawn(3000, rate)
    classifier, _ = fit(known, drawn(800, rate, 1))
    test = drawn(3000, rate, 2)
    probability = classifier.probability(test.rows)
    assert probability.mean() == pytest.approx(test.continues.mean(), abs=0.04)
    assert log_loss(test.continues, probability) < log_loss(
        test.continues, np.full(3000, test.continues.mean())
    )


def test_best_epoch_is_kept_and_not_the_last() -> None:
    valid = drawn(200, 0.5, 1)
    classifier, losses = fit(drawn(100, 0.5), valid)
    probability = classifier.probability(valid.rows)
    loss = -np.mean(np.log(np.where(valid.continues, probability, 1 - probability)))
    assert loss == pytest.approx(min(losses))


def test_seed_decides_everything() -> None:
    known, valid = drawn(200, 0.5), drawn(100, 0.5, 1)
    first, again, other = (fit(known, valid, seed)[1] for seed in (3, 3, 4))
    assert first == again != other


def test_numpy_computes_what_torch_trained() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(into, out) for into, out in ((5, 128), (128, 128), (128, 1))]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    copied = tuple((layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in layers)
    mean, scale = np.full(5, 0.5, np.float32), np.full(5, 2.0, np.float32)
    rows = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    with torch.no_grad():
        wanted = model(torch.from_numpy((rows - mean) / scale))[:, 0].numpy()
    assert np.allclose(Classifier(mean, scale, copied).logits(rows), wanted, atol=1e-5)


def test_conversation_is_never_in_both_parts() -> None:
    known = drawn(1000, 0.5)
    known = Outcomes(known.rows, known.continues, [str(number // 5) for number in range(1000)])
    rest, taken = (set(part.conversations) for part in split(known, 0.3, "x"))
    assert not rest & taken and len(rest | taken) == 200 and 40 < len(taken) < 80
