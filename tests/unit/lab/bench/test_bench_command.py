"""``blendrag bench`` given what it cannot use: one line, before the engine is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from blendrag.cli.app import app

BAD = [
    (("ttft", "--ratios", "0.15,half"), "'half' is not a number"),
    (("ttft", "--ratios", "1.5"), "1.5 is not above 0 and at most 1"),
    (("ttft", "--ratios", "0"), "the arm 'reuse'"),
    (("ttft", "--ratios", ""), "is not a number"),
    (("ttft", "--plot", "out.gif"), "--plot out.gif"),
    (("ttft", "--paste", "absent.md"), "--paste absent.md"),
    (("ttft", "--axis", "chunk"), "no axis 'chunk'"),
    (("ttft", "--values", "2,x"), "'x' is not a value of chunks"),
    (("ttft", "--axis", "tier", "--values", "tape"), "no tier 'tape' here, but ram, disk"),
    (("ttft", "--axis", "ratio", "--ratios", "0.1"), "--ratios does not go with --axis"),
    (("ttft", "--axis", "chunks", "--plot", "out.gif"), "--plot out.gif"),
    (("ttft", "--speculate", "--plot", "out.png"), "--plot does not go with --speculate"),
    (("ttft", "--gpu", "H1000"), "--gpu 'H1000': H100, H200"),
    (("ttft", "--gpu", "H100", "--axis", "ratio"), "--axis does not go with --gpu"),
    (("load", "--pool", "4"), "--pool 4: fewer than the 6 chunks"),
    (("load", "--plot", "absent/out.png"), "there is no folder absent"),
    (("load", "--repeats", "2"), "--repeats does not go with"),
    (("load", "--beside", "--plot", "out"), "--plot out"),
    (("load", "--beside", "--kv-budget", "512"), "--kv-budget does not go with --beside"),
    (("load", "--kv-budget", "512", "--pool", "9"), "--pool does not go with --kv-budget"),
]


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("blendrag.engine.client.engine.Engine.shared", None)


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_option_is_one_line_without_an_engine(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 1
    assert message in result.stderr and result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1 and not result.stdout


def test_selector_that_there_is_not_is_found_out_before_the_engine() -> None:
    result = CliRunner(env={"BLENDRAG_SELECTOR": "hkdv"}).invoke(app, ["bench", "ttft"])
    assert result.exit_code == 1 and result.stderr.startswith("error: unknown selector 'hkdv'")


@pytest.mark.parametrize("command", ["ttft", "load"])
@pytest.mark.parametrize(
    ("option", "value"), [("--chunks", "1"), ("--repeats", "0"), ("--chunk-tokens", "4")]
)
def test_measurement_of_nothing_is_refused(command: str, option: str, value: str) -> None:
    result = CliRunner().invoke(app, ["bench", command, option, value])
    assert result.exit_code == 2 and option in result.stderr and "Traceback" not in result.output


@pytest.mark.parametrize("command", ["bench ttft", "eval --data rows.jsonl"])
def test_library_of_the_extra_is_missed_before_measuring(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").touch()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(app, [*command.split(), "--plot", "out.png"])
    message = 'error: matplotlib is not installed: pip install "blendrag[lab]"\n'
    assert (result.exit_code, result.stderr, result.stdout) == (1, message, "")
