"""How an interrupt and an error end a command, and what is printed on a terminal and elsewhere."""

from __future__ import annotations

from collections.abc import Generator
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from blendrag import Piece
from blendrag.cli.answering import print_stream
from blendrag.cli.console import INTERRUPTED, Commands, heading, interruptible, out, print_json
from blendrag.cli.demo import QUESTIONS, _compare
from blendrag.cli.ingest import _print as print_ingested
from blendrag.cli.profile import _print as print_profile
from blendrag.errors import BlendragError, EngineError
from blendrag.index.answering import AnswerStream
from blendrag.index.ingest import IngestReport
from blendrag.settings import Settings
from blendrag.tables import table_with
from paper_machine import SPEEDS, make_profile


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), INTERRUPTED, "interrupted\n"),
        (BlendragError("no such thing [x]"), 1, "error: no such thing [x]\n"),
        (ZeroDivisionError(), 1, ""),
    ],
)
def test_interrupt_and_own_error_end_with_one_line_and_no_bug_is_hidden(
    error: BaseException, code: int, said: str
) -> None:
    def fail() -> None:
        raise error

    app = typer.Typer(cls=Commands, pretty_exceptions_enable=False)
    app.command()(fail)
    app.callback()(lambda: None)
    result = CliRunner().invoke(app, ["fail"])
    assert (result.exit_code, result.stderr, result.stdout) == (code, said, "")
    assert said or result.exception is error


def test_engine_that_fails_because_of_the_interrupt_is_not_reported_as_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(typer.Exit) as ended, interruptible("go on later"):
        try:
            raise KeyboardInterrupt
        finally:
            raise EngineError("the engine failed at flush")
    assert ended.value.exit_code == INTERRUPTED
    assert capsys.readouterr().err == "go on later\n"


def test_engine_error_of_its_own_passes() -> None:
    with pytest.raises(EngineError), interruptible("go on later"):
        raise EngineError("died")


def test_json_with_what_other_readers_refuse_is_an_error() -> None:
    with pytest.raises(ValueError, match="JSON"):
        print_json({"kl": float("nan")})


@pytest.mark.parametrize("columns", [None, "0"])
def test_table_is_whole_where_nobody_looks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str | None
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    table = table_with("arm", *(f"a long name of column {number}" for number in range(12)))
    table.add_row("gradual@0.15:metric=kv", *("1,234" for _ in range(12)))
    out().print(table)
    text = capsys.readouterr().out
    assert "a long name of column 11" in text and "gradual@0.15:metric=kv" in text and "…" not in text


def test_heading_is_80_columns_long_where_nobody_looks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    heading("1. Ingest", out())
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("1. Ingest ") and len(line) == 80


def test_ingest_says_how_many_documents_a_newer_reader_read_anew(capsys: pytest.CaptureFixture[str]) -> None:
    print_ingested(IngestReport(added=1, changed=5, reread=4, unchanged=2), Path("kb"))
    shown = capsys.readouterr().out
    assert "5 changed (4 of them by a newer reader of the same file), 2 unchanged" in shown


# -- a question's answer on a terminal, and in a pipe ---------------------------------------------------


def pieces(*thoughts: str) -> Generator[Piece]:
    whole: Any = object()  # an answer, which nobody looks at here
    yield from (Piece("", reasoning=thought) for thought in thoughts)
    yield Piece("Good ")
    yield Piece("day.", whole)


def test_thinking_is_printed_where_asked_for_only(capsys: pytest.CaptureFixture[str]) -> None:
    print_stream(AnswerStream(pieces("Let me ", "[see].")))
    assert capsys.readouterr().out == "Good day.\n"
    print_stream(AnswerStream(pieces("Let me ", "[see].")), show_thinking=True)
    assert capsys.readouterr().out == "Let me [see].\nGood day.\n"
    print_stream(AnswerStream(pieces()), show_thinking=True)
    assert capsys.readouterr().out == "Good day.\n"


# -- ``profile``, of a machine whose times are known ----------------------------------------------------

KV_BYTES = 23_040  # of a token: 30 layers of 3 heads of 64, K and V in bfloat16


@pytest.mark.parametrize(
    ("selector", "lowest"), [("hkvd", "redis: it loads in"), ("query", "every tier adds delay")]
)
def test_lowest_tier_that_adds_no_delay_is_named(selector: str, lowest: str) -> None:
    console, settings = Console(file=StringIO(), width=200), Settings(selector=selector, recompute_ratio=0.15)
    print_profile(make_profile(selector=selector, kv_bytes=KV_BYTES), settings, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"(mode B): {lowest}" in said
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines()]
    rows = {row[0]: row[-1] for row in cells if row}
    assert set(SPEEDS) <= rows.keys() and rows["ram"] == "0.15"
    assert (float(rows["object"]) > 0.15) == (selector == "hkvd"), "mode A"


def test_demo_waits_until_the_prefix_cache_is_empty() -> None:
    looks = 0  # until a request that has ended lets go of the cache

    def reset() -> bool:
        nonlocal looks
        looks = max(0, looks - 1)
        return not looks

    def ask(question: str, *, max_tokens: int, blend: bool) -> Any:
        nonlocal looks
        assert not looks, "the prompt is in the cache"
        looks = 3
        return SimpleNamespace(ttft_s=1.0, evidence=SimpleNamespace(computed=1))

    index: Any = SimpleNamespace(start=lambda: SimpleNamespace(reset_prefix_cache=reset), ask=ask)
    assert len(_compare(index, Console(file=StringIO()))) == len(QUESTIONS)
