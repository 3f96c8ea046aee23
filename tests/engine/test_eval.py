"""``blendrag eval``, tiny, on the engine that the other tests use."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from blendrag.engine.client.engine import Engine
from blendrag.lab.evaluate.arms import parse_arms
from blendrag.lab.evaluate.run import EvalOptions, run_eval
from blendrag.progress import SILENT, Progress
from blendrag.settings import Settings

pytestmark = pytest.mark.engine

ARMS = ["full", "reuse", "hkvd@1", "hkvd@0.25", "reuse:start", "reuse:system", "reuse:int8"]


@pytest.fixture
def data(tmp_path: Path, texts: list[str]) -> Path:
    """Three questions, each over two passages of 160 tokens; the last asks for a decision."""
    path = tmp_path / "mine.jsonl"
    rows: list[dict[str, Any]] = [
        {"question": f"What is text {n} about?", "answer": "A Python package.", "documents": texts[n : n + 2]}
        for n in range(3)
    ]
    rows[-1] |= {"answer": "yes", "choices": ["yes", "no"]}
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def own(settings: Settings) -> Settings:
    return settings.model_copy(update={"chunk_tokens": 64})


def asked(data: Path, arms: str, own: Settings, **options: Any) -> EvalOptions:
    return EvalOptions(data, "jsonl", parse_arms(arms.split(","), None, own), max_tokens=4, **options)


def test_ratio_1_is_full_prefill_and_reuse_is_not_and_nothing_is_left_behind(
    command: Callable[..., Result], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = data.parent / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    result = command(
        "eval", "--data", str(data), "--arms", ",".join(ARMS), "--max-tokens", "4", "--json",
        "--plot", str(data.parent / "out.png"), BLENDRAG_CHUNK_TOKENS="64",
    )  # fmt: skip
    results = json.loads(result.stdout)
    arms = results["arms"]
    assert list(arms) == ARMS
    for arm in arms.values():
        assert arm["n"] == 3
        for name in ("f1", "nll_gold", "gap_closed", "kl_first_token", "kl_answer",
                     "top1_agreement", "f1_vs_full", "decision_agreement"):  # fmt: skip
            assert arm[name].keys() == {"mean", "low", "high"}
            assert arm[name]["low"] <= arm[name]["mean"] <= arm[name]["high"]
    loss = {name: arm["nll_loss"]["mean"] for name, arm in arms.items()}
    kl, whole = (
        {name: arm[key]["mean"] for name, arm in arms.items()} for key in ("kl_first_token", "kl_answer")
    )
    assert abs(loss["hkvd@1"]) < 1e-3 and kl["hkvd@1"] < 1e-4 and whole["hkvd@1"] < 1e-4
    assert loss["reuse:start"] != loss["reuse"]
    for name in ("reuse", "hkvd@0.25", "reuse:system", "reuse:int8"):
        assert abs(loss[name]) > 1e-2 and kl[name] > 1e-3 and whole[name] > 1e-3 and whole[name] != kl[name]
    assert 0 < abs(loss["reuse:int8"] - loss["reuse"]) < abs(loss["reuse:system"] - loss["reuse"])
    assert arms["hkvd@1"]["exact_text"]["mean"] == arms["hkvd@1"]["decision_agreement"]["mean"] == 1
    assert arms["hkvd@0.25"]["recomputed"]["mean"] == pytest.approx(0.3, abs=0.06)
    assert "3 questions tell too little" in results["recommendation"]["why"] and results["machine"]["vllm"]
    assert results["recommendation"]["why"][:20] in result.stderr
    assert results["config"]["rows"] == 3 and not results["config"]["too_long"]
    assert not list(folder.iterdir())


class Interrupted(Progress):
    """Somebody presses Ctrl-C when free answers begin for the second time."""

    begun = 0

    def note(self, message: str) -> None:
        self.begun += message == "free answers"
        if self.begun == 2:
            raise KeyboardInterrupt


class Counted(Progress):
    steps = 0

    def total(self, steps: int) -> None:
        self.steps = steps


def test_interrupted_run_asks_only_what_is_left(engine: Engine, own: Settings, data: Path) -> None:
    kept = data.parent / "rows.jsonl"
    options = asked(data, "reuse", own, rows=kept)
    with pytest.raises(KeyboardInterrupt):
        run_eval(own, options, Interrupted())
    first = kept.read_bytes()
    assert first.count(b"\n") == 3  # what it is a run of, and two samples
    counted = Counted()
    results = run_eval(own, options, counted)
    assert counted.steps == 4 and kept.read_bytes().startswith(first)
    assert results.arms["reuse"].n == 3
    another = asked(data, "reuse,first_k@0.5", own, rows=kept)
    assert list(run_eval(own, another, counted).arms) == ["full", "reuse", "first_k@0.5"]
    assert counted.steps == 3


def test_reordered_documents_are_answered_and_timed(engine: Engine, own: Settings, data: Path) -> None:
    kept = data.parent / "rows.jsonl"
    arms = run_eval(own, asked(data, "reordered", own, limit=1, rows=kept), SILENT).arms
    assert arms["reordered"].nll_loss.mean != 0 and arms["reordered"].ttft_ms.mean > 0
    samples = {sample["arm"]: sample for sample in map(json.loads, kept.read_text().splitlines()[1:])}
    assert all(sample["text"] and not sample["cached"] for sample in samples.values())


def test_prompts_beyond_the_window_are_left_out_and_named(engine: Engine, own: Settings, data: Path) -> None:
    rows = [json.loads(line) for line in data.read_text().splitlines()[:2]]
    rows[0]["documents"] = [" ".join(rows[0]["documents"]) * 15]
    data.write_text("\n".join(map(json.dumps, rows)))
    config = run_eval(own, asked(data, "full", own), SILENT).config
    assert (config["rows"], config["too_long"]) == (1, ["1"])
