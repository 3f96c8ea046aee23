"""The commands that need an engine: in this process, on the engine that the other tests use."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from blendrag.cli.app import app
from blendrag.engine.client.engine import Engine
from blendrag.index.loaders import Document
from one_engine import variables

pytestmark = pytest.mark.engine

TEXTS = {
    "kite.txt": "A kite is a tethered aircraft. " * 20 + "The kite of Ada is orange and has a tail of silk.",
    "barge.txt": "A barge is a flat boat for heavy goods. " * 20 + "The barge of Bo is called Marigold.",
}


@pytest.fixture(scope="module")
def blendrag(
    engine: Engine, engine_options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Result]]:
    """The command line in a folder with two documents. The engine's options come from the environment."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "docs").mkdir()
    for name, text in TEXTS.items():
        (folder / "docs" / name).write_text(text)
    options = variables(engine_options)
    runner = CliRunner(env={**options, "COLUMNS": "200", "NO_COLOR": "1", "BLENDRAG_MIN_CACHED_TOKENS": "0"})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield lambda *arguments, **kwargs: runner.invoke(app, list(arguments), **kwargs)


@pytest.fixture(scope="module")
def ingested(blendrag: Callable[..., Result]) -> dict[str, Any]:
    result = blendrag("ingest", "docs", "--json")
    assert result.exit_code == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_ingest_reports_as_json_only_and_skips_what_is_unchanged(
    blendrag: Callable[..., Result], ingested: dict[str, Any]
) -> None:
    assert ingested["added"] == 2 and ingested["tokens"] > 0 and ingested["nbytes"] > 0
    again = json.loads(blendrag("ingest", "docs", "--json").stdout)
    assert again["unchanged"] == 2 and again["tokens"] == 0


def test_answer_names_its_sources_and_what_was_reused(
    blendrag: Callable[..., Result], ingested: dict[str, Any]
) -> None:
    result = blendrag("ask", "What colour is Ada's kite?", "--max-tokens", "4")
    assert result.exit_code == 0, result.stderr
    assert str(Path("docs") / "kite.txt") in result.stdout
    assert "tokens reused" in result.stdout and "first token after" in result.stdout


def test_options_reach_the_engine(blendrag: Callable[..., Result], ingested: dict[str, Any]) -> None:
    question = ("ask", "What is Bo's barge called?", "--json", "--max-tokens", "2")
    all_reused = json.loads(blendrag(*question, "--ratio", "0", "--similarity-top-k", "1").stdout)
    assert len(all_reused["sources"]) == 1 and all_reused["tokens"] <= 2
    assert all_reused["evidence"]["reused"] > all_reused["evidence"]["recomputed"]
    assert all_reused["evidence"]["recomputed"] < 32, "of the block in which the documents end"
    plain = json.loads(blendrag(*question, "--no-blend").stdout)
    assert plain["evidence"]["reused"] == 0 and "switched off" in plain["evidence"]["plain"]


def test_explain_shows_the_plan_without_asking(
    blendrag: Callable[..., Result], ingested: dict[str, Any]
) -> None:
    table = blendrag("ask", "What colour is Ada's kite?", "--explain")
    assert table.exit_code == 0 and "cached" in table.stdout and "kite.txt" in table.stdout
    rows = json.loads(blendrag("ask", "What colour is Ada's kite?", "--explain", "--json").stdout)
    assert {row["kind"] for row in rows} == {"fresh", "cached"}


def test_chat_answers_every_line_and_leaves_at_the_end(
    blendrag: Callable[..., Result], ingested: dict[str, Any]
) -> None:
    result = blendrag("ask", "--max-tokens", "3", input="Whose kite is it?\n\nAnd the barge?\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("first token after") == 2


def test_doctor_passes_on_the_packaged_model(blendrag: Callable[..., Result], engine: Engine) -> None:
    result = blendrag("doctor", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["passed"], report
    assert blendrag("doctor").exit_code == 0


def test_demo_can_be_read_by_scripts(
    blendrag: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    documents = [Document(text, name) for name, text in TEXTS.items()]
    monkeypatch.setattr("blendrag.cli.demo_documents.demo_documents", lambda: documents)
    monkeypatch.setattr("blendrag.cli.demo.QUESTIONS", ("What is Bo's barge called?", "What has Ada's kite?"))
    result = blendrag("demo", "--folder", str(tmp_path), "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["ingest"]["added"] == 2 and "speed-up" in result.stderr
    for row in found["questions"]:
        assert row["blended_tokens"] < row["full_tokens"] and row["speedup"] > 0
