"""``blendrag evictor`` as a user meets it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from typer.testing import Result

from blendrag.errors import PredictorError
from blendrag.forecast.conversation import Window
from blendrag.forecast.features import Features
from blendrag.forecast.outcome_log import OutcomeLog
from blendrag.forecast.trace_log import TraceLog
from blendrag.forecast.words import open_embedder
from blendrag.lab.eviction.learn_predictor import one_at_a_time
from blendrag.models import DEFAULT_EMBEDDER
from word_embedder import write_dialogs

pytestmark = pytest.mark.slow

Blendrag = Callable[..., Result]


@pytest.fixture
def cache(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder; and conversations in the working folder."""
    monkeypatch.setenv("BLENDRAG_CACHE_DIR", str(workdir / "cache"))
    write_dialogs(workdir / "dialogs.jsonl", 60)
    write_dialogs(workdir / "others.jsonl", 25)
    return workdir / "cache"


def test_train_then_eval_then_status(blendrag: Blendrag, cache: Path, workdir: Path) -> None:
    made = blendrag("evictor", "train", "--data", "dialogs.jsonl", "--seed", "1", "--json")
    assert made.exit_code == 0, made.stderr
    assert "calibration error" in made.stderr and "evictor" in made.stderr
    learned = json.loads(made.stdout)["lpc"]
    assert learned["embedder"] == DEFAULT_EMBEDDER and 0.0 <= learned["metrics"]["lpc"]["auc"] <= 1.0
    judged = blendrag("evictor", "eval", "--data", "others.jsonl", "--json")
    assert judged.exit_code == 0, judged.stderr
    results = json.loads(judged.stdout)
    assert results["conversations"] == 25 and not results["held_out_only"]
    assert {"auc", "brier", "log_loss", "calibration_error"} == results["lpc"].keys()
    facts = json.loads(blendrag("evictor", "status", "--json").stdout)
    assert facts["policy"] == "lpc" and facts["embedder"] == DEFAULT_EMBEDDER and facts["vector_bytes"] > 0
    assert "dialogs.jsonl" in blendrag("evictor", "status").stdout


def test_status_without_a_predictor_says_lru_and_why(blendrag: Blendrag, cache: Path) -> None:
    result = blendrag("evictor", "status")
    assert result.exit_code == 0 and "evictor train" in result.stdout
    assert re.search(r"lpc goes by +lru\b", result.stdout), "the default policy is another"


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        (["train"], 2, "--from-log"),
        (["train", "--data", "dialogs.jsonl", "--from-log"], 2, "--from-log"),
        (["train", "--trace", "dialogs.jsonl", "--from-log"], 2, "--trace"),
        (["train", "--trace", "dialogs.jsonl", "--data", "dialogs.jsonl"], 2, "--trace"),
        (["train", "--trace", "absent.jsonl"], 1, "absent.jsonl"),
        (["train", "--trace", "cache"], 1, "cache"),
        (["train", "--trace", "."], 1, "'.'"),
        (["train", "--trace", "dialogs.jsonl"], 1, "'dialogs.jsonl' is no trace of prompts"),
        (["train", "--data", "absent.jsonl"], 1, "absent.jsonl"),
        (["train", "--data", "dialogs.jsonl", "--embedder", "./absent"], 1, "absent"),
        (["train", "--from-log"], 1, "no outcomes"),
        (["eval", "--data", "dialogs.jsonl"], 1, "evictor train makes one"),
    ],
)
def test_what_is_missing_is_said(
    blendrag: Blendrag, cache: Path, arguments: list[str], code: int, hint: str
) -> None:
    result = blendrag("evictor", *arguments)
    assert result.exit_code == code and hint in result.stderr, result.stderr
    assert "Traceback" not in result.output and not result.stdout


def test_log_is_learned_from_once_and_not_for_the_worse(blendrag: Blendrag, cache: Path) -> None:
    features = Features(open_embedder(DEFAULT_EMBEDDER))
    log = OutcomeLog(cache / "evictor", DEFAULT_EMBEDDER)
    rows = features.rows([Window(("where is it",), 1), Window(("where is it", "thanks bye"), 2)])
    for number in range(60):
        log.record([f"c{number}"] * 2, [number * 10.0, number * 10.0 + 1], rows)
    log.record(["last"], [100_000.0], rows[:1])
    log.close()
    first = blendrag("evictor", "train", "--from-log", "--json")
    assert first.exit_code == 0 and "written to" in first.stderr, first.stderr
    learned = json.loads(first.stdout)
    assert learned.keys() == {"lpc"} and learned["lpc"]["new_loss"] < learned["lpc"]["old_loss"]
    again = blendrag("evictor", "train", "--from-log")
    assert "calibration error" in again.stdout
    assert again.exit_code == 0 and "not better, nothing changed" in again.stderr, again.stderr


def test_every_error_of_a_predictor_ends_a_command_with_a_line(
    blendrag: Blendrag, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from blendrag.lab.eviction import learn_predictor

    def refuse(*arguments: object, **options: object) -> None:
        raise PredictorError("nothing to learn")

    monkeypatch.setattr(learn_predictor, "train_on_file", refuse)
    result = blendrag("evictor", "train", "--data", "dialogs.jsonl")
    assert result.exit_code == 1 and result.stderr.strip() == "error: nothing to learn"


def test_traffic_of_a_store_teaches_one_policy_only(blendrag: Blendrag, cache: Path) -> None:
    log = TraceLog(cache / "evictor" / "trace-a.jsonl", clock=iter(float(at) for at in range(2000)).__next__)
    random = Random(0)
    for number in range(400):
        once = [(f"{number}.{place}", 100) for place in range(3)]
        log.note([(f"often {random.randrange(20)}", 100), *once], 500, 9)
    log.close(60.0)
    first = blendrag("evictor", "train", "--from-log")
    assert first.exit_code == 0 and "lpc+: written to" in first.stderr, first.stderr
    assert "no outcomes" in first.stderr, "of lpc nothing is known"
    facts = json.loads(blendrag("evictor", "status", "--json").stdout)
    assert facts["traffic_logs"] == [str(log.path)] and facts["lpc_plus"] == str(log.path)
    assert "trace-a.jsonl" in blendrag("evictor", "status").stdout.replace("\n", "").replace(" ", "")
    replayed = blendrag("bench", "eviction", "--trace", str(log.path), "--sizes", "800", "--policies", "lru")
    assert replayed.exit_code == 0 and "optimal" in replayed.stdout, replayed.stderr
    again = blendrag("evictor", "train", "--from-log")
    assert again.exit_code == 0 and "lpc+: not better, nothing changed" in again.stderr, again.stderr


def write_blocks(path: Path, prompts: int) -> None:
    """A conversation of two blocks that is heard of twenty times, and prompts that are asked once."""
    random, lines = Random(0), []
    for number in range(prompts):
        one = random.randrange(20)
        keys = [one, 100 + one] if number % 2 else [1000 + 3 * number + i for i in range(3)]
        tokens = 512 * len(keys)
        lines.append({"timestamp": 100 * number, "input_length": tokens, "hash_ids": keys})
    path.write_text("\n".join(map(json.dumps, lines)))


def test_trace_is_learned_from_for_the_worse_or_in_part(
    blendrag: Blendrag, cache: Path, workdir: Path
) -> None:
    write_blocks(workdir / "a.jsonl", 500)
    first = blendrag("evictor", "train", "--trace", "a.jsonl")
    assert first.exit_code == 0 and not first.stdout, first.stderr
    assert "lpc+: written to" in first.stderr and "of 500 prompts, LRU" in first.stderr, first.stderr
    kept = (cache / "evictor" / "hazard.safetensors").read_bytes()
    again = blendrag("evictor", "train", "--trace", "a.jsonl", "--json")
    assert again.exit_code == 0 and "not better, nothing changed" in again.stderr, again.stderr
    learned = json.loads(again.stdout)["lpc_plus"]
    assert not learned["live"] and learned["new"] == learned["old"] and learned["prompts"] == 500
    assert (cache / "evictor" / "hazard.safetensors").read_bytes() == kept


def test_short_trace_teaches_something(blendrag: Blendrag, cache: Path, workdir: Path) -> None:
    write_blocks(workdir / "short.jsonl", 150)
    alone = blendrag("evictor", "train", "--trace", "short.jsonl")
    assert alone.exit_code == 1 and "150 prompts in 'short.jsonl' are too few" in alone.stderr
    assert not (cache / "evictor" / "hazard.safetensors").exists()


def test_model_of_prefixes_takes_a_store_s_place(blendrag: Blendrag, cache: Path, workdir: Path) -> None:
    write_blocks(workdir / "blocks.jsonl", 400)
    lines = map(json.loads, (workdir / "blocks.jsonl").read_text().splitlines())
    chunks = [line | {"sizes": [512] * len(line["hash_ids"]), "independent": True} for line in lines]
    (workdir / "log.jsonl").write_text("".join(json.dumps(chunk) + "\n" for chunk in chunks))

    def known() -> str:
        return str(json.loads(blendrag("evictor", "status", "--json").stdout)["lpc_plus"])

    prefixes = blendrag("evictor", "train", "--trace", "blocks.jsonl")
    assert prefixes.exit_code == 0 and "do not go by it" in prefixes.stderr, prefixes.stderr
    assert "the default" not in prefixes.stderr, "no store goes by it"
    assert known().startswith("lru: ") and "prefixes" in known()
    ours = blendrag("evictor", "train", "--trace", "log.jsonl")
    assert ours.exit_code == 0 and "written to" in ours.stderr and "before" not in ours.stderr, ours.stderr
    assert known() == "log.jsonl"
    assert ", GDSF " in ours.stderr and "the default" in ours.stderr, "is it worth setting?"
    refused = blendrag("evictor", "train", "--trace", "blocks.jsonl")
    assert refused.exit_code == 1 and "--out" in refused.stderr and known() == "log.jsonl"
    elsewhere = blendrag("evictor", "train", "--trace", "blocks.jsonl", "--out", "other")
    assert elsewhere.exit_code == 0 and (workdir / "other" / "hazard.safetensors").exists()


def test_two_trainings_at_once_spoil_each_others_files(blendrag: Blendrag, cache: Path) -> None:
    with one_at_a_time(cache / "evictor"):
        result = blendrag("evictor", "train", "--from-log")
    assert result.exit_code == 1 and "another training" in result.stderr
    with one_at_a_time(cache / "evictor"):
        pass
