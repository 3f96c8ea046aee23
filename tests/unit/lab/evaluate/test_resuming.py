"""What a run refuses before an engine starts: samples of another run, and to do without its packages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blendrag.errors import ConfigError, ModelError
from blendrag.lab.evaluate.arms import parse_arms
from blendrag.lab.evaluate.run import EvalOptions, run_eval
from blendrag.lab.evaluate.samples import SampleLog
from blendrag.progress import SILENT
from blendrag.settings import Settings

DEPENDED_ON = (
    "commit", "vllm", "blendrag", "cpu", "omp_threads", "shared_prefix", "context_tokens", "blend_share",
)  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Of a folder that holds no model: runs end where the engine would start."""
    return Settings.load(model=str(tmp_path))


@pytest.fixture
def options(tmp_path: Path, settings: Settings) -> EvalOptions:
    data = tmp_path / "mine.jsonl"
    data.write_text(json.dumps({"question": "Where?", "answer": "Here.", "documents": ["It is here."]}))
    return EvalOptions(data, "jsonl", parse_arms(["reuse"], None, settings), rows=tmp_path / "rows.jsonl")


@pytest.fixture
def config(settings: Settings, options: EvalOptions) -> dict[str, Any]:
    """What a run leaves in its file at once."""
    assert options.rows
    with pytest.raises(ModelError):
        run_eval(settings, options, SILENT)
    found = json.loads(options.rows.read_text())["config"]
    options.rows.unlink()
    return dict(found)


@pytest.mark.parametrize("name", DEPENDED_ON)
def test_samples_made_by_something_else_are_not_gone_on_with(
    name: str, config: dict[str, Any], settings: Settings, options: EvalOptions
) -> None:
    assert options.rows
    with SampleLog.open(options.rows, config | {name: "another"}):
        pass
    said = rf'\({name} was "another", is .*\): name another file, or delete this one to start again'
    with pytest.raises(ConfigError, match=said):
        run_eval(settings, options, SILENT)


def test_version_of_the_engine_is_known(config: dict[str, Any]) -> None:
    assert config["vllm"] and config["blendrag"] and "commit" in config
