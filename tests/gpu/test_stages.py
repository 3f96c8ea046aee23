"""`make gpu` itself: what it refuses, its limits, and that a stage is kept apart from the next."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from blendrag.models import model_window, resolve_model
from places import ROOT
from random_model import SHAPES, WINDOW, config_of, random_model

SCRIPT = ROOT / "tests" / "gpu" / "stages.py"
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT), run_name="stages")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param([], "there is no GPU here", marks=without_gpu),
        pytest.param(["STAGE=tensors"], "there is no GPU here", marks=without_gpu),
        (
            ["STAGE=tensor"],
            "there are tensors, doctor, llama, mistral, faults, budget; did you mean tensors?",
        ),
        (["STAGE=model"], "no stage 'model'"),
        (["STAGE=llama", "MODEL=somewhere"], "there are tensors, doctor, model, faults, budget"),
        (["MODEL=somewhere"], "MODEL=somewhere is not the folder of a model"),
    ],
)
def test_what_cannot_run_is_one_line_and_exit_code_2(words: list[str], said: str) -> None:
    command = ["make", "--no-print-directory", "gpu", f"PYTHON={sys.executable}", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = (done.stdout + done.stderr).splitlines()
    assert said in line


@pytest.mark.parametrize("model", ["", "folder"])
def test_stages_take_no_longer_than_a_machine_is_lent_and_select_tests_that_exist(
    script: dict[str, Any], model: str
) -> None:
    stages = script["stages"](model).values()
    assert max(stage.minutes for stage in stages) <= 9 and sum(stage.minutes for stage in stages) <= 28
    assert all((ROOT / "tests" / test).exists() for stage in stages for test in stage.tests)


def test_stage_leaves_its_own_tables_and_not_those_of_the_last_run(
    script: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "tensors.md").write_text("of the last run")
    assert script["run"]("tensors", script["Stage"](1, ("gpu/test_tensors.py",)), tmp_path)
    tables = (tmp_path / "tensors.md").read_text()
    assert "of the last run" not in tables
    for piece in ("codec", "loader", "selector"):
        assert f"| {piece} |" in tables


@pytest.mark.parametrize(("minutes", "said"), [(0, "too long"), (1, "FAILED")])
def test_stage_that_hangs_or_fails_lets_the_next_run(
    script: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str], minutes: int, said: str
) -> None:
    assert not script["run"]("faults", script["Stage"](minutes, ("gpu/no_such_test.py",)), tmp_path)
    assert said in capfd.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(("shape", "billions"), [("llama", 8.03), ("mistral", 7.38)])
def test_model_of_a_shape_has_its_size(shape: str, billions: float, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape, tokenizer))
    assert sum(each.numel() for each in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize("shape", SHAPES)
def test_model_of_a_shape_can_be_opened(shape: str, tokenizer: Any, tmp_path: Path) -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    folder = random_model(shape, tokenizer, tmp_path, "cpu", **small)
    assert resolve_model(str(folder), tmp_path) == folder and model_window(folder) == WINDOW
