"""``blendrag fit`` as a user meets it, and what ``bench eviction`` and it say of wrong input."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random

import numpy as np
import pytest
from typer.testing import Result

from blendrag.errors import PredictorError
from blendrag.eviction.fitted import Fitted, load_fitted, save_fitted
from blendrag.eviction.hazard import Hazard
from blendrag.forecast.conversation import Window
from blendrag.forecast.features import features_of
from blendrag.forecast.log import Prompt, PromptLog
from blendrag.lab.eviction import fit_predictor
from blendrag.models import DEFAULT_EMBEDDER
from word_embedder import write_dialogs

Blendrag = Callable[..., Result]


@pytest.fixture
def cache(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The evictor's folder; and conversations in the working folder."""
    monkeypatch.setenv("BLENDRAG_CACHE_DIR", str(workdir / "cache"))
    write_dialogs(workdir / "dialogs.jsonl", 60)
    return workdir / "cache" / "evictor"


def chunks(log: PromptLog, prompts: int) -> None:
    """Documents that are asked for again and again, each among three that nobody wants twice."""
    random = Random(0)
    for number in range(prompts):
        once = tuple((f"{number}.{place}", 100) for place in range(3))
        log.record("store", [Prompt(float(number), ((f"often {random.randrange(20)}", 100), *once))], [None])


def conversations(log: PromptLog, count: int) -> None:
    windows = [Window(("where is it",), 1), Window(("where is it", "thanks bye"), 2)]
    rows = list(features_of(DEFAULT_EMBEDDER).rows(windows))
    for number in range(count):
        said = [Prompt(number * 10.0 + n, (), f"c{number}", window) for n, window in enumerate(windows)]
        log.record("store", said, rows, DEFAULT_EMBEDDER)
    log.record("store", [Prompt(100_000.0, (), "last", windows[0])], rows[:1], DEFAULT_EMBEDDER)


def test_conversations_are_learned_from_and_replayed(blendrag: Blendrag, cache: Path) -> None:
    made = blendrag("fit", "--data", "dialogs.jsonl", "--held-out", "0.4", "--json")
    assert made.exit_code == 0 and "nats" in made.stderr and "fitted.safetensors" in made.stderr, made.stderr
    learned = json.loads(made.stdout)
    assert learned.keys() == {"lpc"} and learned["lpc"]["embedder"] == DEFAULT_EMBEDDER
    assert learned["lpc"]["quality"]["log_loss"] > 0.0
    assert load_fitted(cache / "fitted.safetensors").facts == learned
    replayed = blendrag("bench", "eviction", "--trace", "dialogs.jsonl", "--sizes", "200", "--seeds", "1")
    assert replayed.exit_code == 0 and "has not seen" in replayed.stdout.replace("\n", " "), replayed.stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--data", "absent.jsonl"], "absent.jsonl"),
        (["--data", "dialogs.jsonl", "--embedder", "./absent"], "absent"),
        ([], "outcome_log"),
        (["--held-out", "0.5"], "--held-out is of conversations: add --data FILE"),
    ],
)
def test_what_is_missing_is_said(blendrag: Blendrag, cache: Path, arguments: list[str], hint: str) -> None:
    result = blendrag("fit", *arguments)
    assert result.exit_code == 1 and hint in result.stderr, result.stderr
    assert "Traceback" not in result.output and not result.stdout


def test_nothing_is_made_in_a_file_that_is_no_log(blendrag: Blendrag, cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "prompts.sqlite").touch()
    result = blendrag("fit")
    assert result.exit_code == 1 and "cannot be used as a log" in result.stderr, result.stderr
    with closing(sqlite3.connect(cache / "prompts.sqlite")) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == []


def test_log_teaches_both_policies_what_it_can(blendrag: Blendrag, cache: Path) -> None:
    log = PromptLog(cache / "prompts.sqlite")
    neither = blendrag("fit")
    assert neither.exit_code == 1 and "lpc: " in neither.stderr and "lpc+: " in neither.stderr
    chunks(log, 400)
    table = blendrag("fit", "--json")
    assert table.exit_code == 0 and "lpc: the log" in table.stderr, table.stderr
    assert json.loads(table.stdout).keys() == {"lpc+"} and "GDSF, the default" in table.stderr
    conversations(log, 60)
    both = blendrag("fit", "--json")
    assert both.exit_code == 0 and json.loads(both.stdout).keys() == {"lpc", "lpc+"}, both.stderr
    fitted = load_fitted(cache / "fitted.safetensors")
    assert fitted.classifier is not None and fitted.hazard is not None
    replayed = blendrag("bench", "eviction", "--trace", str(log.path), "--sizes", "800", "--policies", "lru")
    assert replayed.exit_code == 0 and "optimal" in replayed.stdout, replayed.stderr


def test_what_is_no_better_than_nothing_is_not_written(blendrag: Blendrag, cache: Path) -> None:
    log = PromptLog(cache / "prompts.sqlite")
    for number in range(500):  # every document twice in a row: LRU finds all that can be found
        log.record("store", [Prompt(float(number), ((str(number // 2), 100),))], [None])
    result = blendrag("fit", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout) == {}, result.stderr
    assert "lpc+: no better than LRU" in result.stderr and not (cache / "fitted.safetensors").exists()


def test_what_was_fitted_before_stays_beside_what_is_new(blendrag: Blendrag, cache: Path) -> None:
    hazard = Hazard((0.0, 1.0, 9.0), {"count": (2.0, 3.0)}, np.ones((2, 2)), np.zeros(2), False)
    save_fitted(cache / "fitted.safetensors", Fitted(hazard=hazard, facts={"lpc+": {"prompts": 400}}))
    assert blendrag("fit", "--data", "dialogs.jsonl").exit_code == 0
    fitted = load_fitted(cache / "fitted.safetensors")
    assert fitted.classifier is not None and fitted.hazard is not None
    assert np.array_equal(fitted.hazard.weights, hazard.weights)
    assert fitted.facts.keys() == {"lpc", "lpc+"} and fitted.facts["lpc+"] == {"prompts": 400}
    (cache / "fitted.safetensors").write_bytes(b"of another version")
    assert blendrag("fit", "--data", "dialogs.jsonl").exit_code == 0
    assert load_fitted(cache / "fitted.safetensors").hazard is None


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [(PredictorError("nothing to learn"), 1, "error: nothing to learn"), (KeyboardInterrupt(), 130, "stays")],
)
def test_command_that_fails_ends_with_a_line_and_writes_nothing(
    blendrag: Blendrag,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    says: str,
) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(fit_predictor, "train_on_file", fails)
    result = blendrag("fit", "--data", "dialogs.jsonl")
    assert result.exit_code == code and says in result.stderr, result.stderr
    assert not (cache / "fitted.safetensors").exists()


# -- wrong files and options: a line that says so -------------------------------------------------------

BLOCKS = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}


def refused(result: Result, *hints: str) -> None:
    assert result.exit_code == 1 and not result.stdout, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert all(hint in result.stderr for hint in hints), result.stderr


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        *((["--sizes", "10", "--trace", name], name) for name in ("empty.jsonl", "folder", "nowhere.jsonl")),
        (["--sizes", "0"], "must hold 1 or more"),
        (["--sizes", "-5"], "must hold 1 or more"),
        (["--sizes", "1e3"], "whole numbers"),
        (["--sizes", "5", "--policies", "lruu"], "unknown 'lruu'; there are"),
        (["--sizes", "5", "--policies", "lru,"], "unknown ''"),
    ],
)
def test_wrong_value_of_an_option_is_refused_in_a_line(
    blendrag: Blendrag, workdir: Path, options: list[str], hint: str
) -> None:
    (workdir / "empty.jsonl").touch()
    (workdir / "folder").mkdir()
    (workdir / "trace.jsonl").write_text(json.dumps(BLOCKS))
    refused(blendrag("bench", "eviction", "--trace", "trace.jsonl", *options), hint)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["bench", "eviction", "--trace", "t", "--sizes", "5", "--polices", "lru"], "--policies"),
        (["bench", "eviction", "--trace", "t", "--sizes", "5", "--seeds", "0"], "--seeds"),
        (["bench", "eviction", "--trace", "t", "--sizes", "5", "--warmup", "1"], "--warmup"),
        (["bench", "eviction", "--trace", "t", "--sizes", "5", "--warmup", "nan"], "--warmup"),
        (["bench", "eviction", "--trace", "t", "--sizes", "5", "--seconds", "nan"], "--seconds"),
        (["bench", "eviction", "--trace", "t"], "--sizes"),
        (["bench", "evictoin"], "eviction"),
        (["fit", "--dta", "t"], "--data"),
    ],
)
def test_typo_is_told_what_was_meant(blendrag: Blendrag, words: list[str], hint: str) -> None:
    result = blendrag(*words)
    assert result.exit_code == 2 and hint in result.stderr and "Traceback" not in result.output


def test_arrivals_are_read_before_anything_is_embedded(
    blendrag: Blendrag, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from blendrag.lab.eviction import source

    monkeypatch.setattr(source, "embedded", lambda *arguments: pytest.fail("embedded"))
    paragraphs = [{"context": "x", "qas": [{"question": "y"}]}]
    (workdir / "set.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    (workdir / "azure.csv").write_text("yesterday\n")
    options = ("--sizes", "5", "--arrivals", "azure.csv")
    refused(blendrag("bench", "eviction", "--trace", "set.json", *options), "azure.csv")
