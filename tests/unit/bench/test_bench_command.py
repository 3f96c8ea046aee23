"""``blendrag bench ttft`` given what it cannot use: one line, before the engine is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from blendrag.bench.ttft import BenchOptions, parse_ratios
from blendrag.cli.app import app
from blendrag.errors import ConfigError

BAD = [
    (("--ratios", "0.15,half"), "'half' is not a number"),
    (("--ratios", "1.5"), "1.5 is not above 0 and at most 1"),
    (("--ratios", "0"), "the arm 'reuse'"),
    (("--ratios", ""), "is not a number"),
    (("--data", "absent.jsonl"), "cannot read 'absent.jsonl'"),
    (("--selector", "hkdv"), "unknown selector"),
    (("--plot", "out.gif"), "--plot out.gif"),
    (("--json", "absent/out.json"), "--json absent/out.json"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_option_is_one_line_without_an_engine(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("blendrag.engine.handle.Engine.shared", None)
    result = CliRunner().invoke(app, ["bench", "ttft", *arguments])
    assert result.exit_code == 1
    assert message in result.stderr and result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1 and not result.stdout


def test_one_chunk_is_refused_because_it_has_no_other_order() -> None:
    assert CliRunner().invoke(app, ["bench", "ttft", "--chunks", "1"]).exit_code == 2
    with pytest.raises(ConfigError, match="no other order"):
        BenchOptions(chunks=1)


def test_ratio_given_twice_is_measured_once() -> None:
    assert parse_ratios("0.3, 0.15,0.30") == (0.3, 0.15)
