"""A new user's empty working folder, and the command line in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

Blendrag = Callable[..., Result]


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def blendrag(workdir: Path) -> Blendrag:
    """Call as ``blendrag("ask", "question")``; gives exit_code, stdout, stderr."""
    from blendrag.cli.app import app

    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    return lambda *arguments, **options: runner.invoke(app, [str(a) for a in arguments], **options)


@pytest.fixture
def made(blendrag: Blendrag, workdir: Path, model_dir: Path) -> Path:
    """An index without documents: what ingesting an empty folder leaves behind."""
    (workdir / "empty").mkdir()
    result = blendrag("ingest", "empty", "--model", model_dir)
    assert result.exit_code == 1 and "no documents in folder" in result.stderr
    return workdir / "blendrag-index"
