"""Results in files and on pages."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from blendrag.cli.console import out, print_json
from blendrag.errors import ConfigError
from blendrag.lab.canvas import check_plot_path
from blendrag.lab.report import Page, table_with
from paper_machine import MACHINE


def test_json_holds_what_other_readers_refuse() -> None:
    with pytest.raises(ValueError, match="JSON"):
        print_json({"kl": float("nan")})


@pytest.mark.parametrize("name", ["out.gif", "out", "absent/out.png"])
def test_picture_that_cannot_be_written_is_measured_first(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--plot"):
        check_plot_path(tmp_path / name)


def test_table_is_cut_to_80_columns_where_nobody_looks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table = table_with("arm", *(f"a long name of column {number}" for number in range(12)))
    table.add_row("gradual_kv@0.15", *("1,234" for _ in range(12)))
    out().print(table)
    text = capsys.readouterr().out
    assert "a long name of column 11" in text and "gradual_kv@0.15" in text and "…" not in text


PAGE = "# A\n<!-- t-table -->\nold\n<!-- /t-table -->\nbetween\n<!-- t-table-2 --><!-- /t-table-2 -->\nend\n"


def test_table_is_pasted_elsewhere_or_loses_what_it_was_measured_on(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    page, console = Page(path, "t"), Console(file=io.StringIO())
    page.watch(console)
    for number in range(3):
        table = table_with("arm", "TTFT ms")
        table.add_row(f"arm {number}", "1,234")
        console.print(table)
    console.print("a note", markup=False)
    page.paste(MACHINE)
    measured = "Commit 0123456, paper on paper, 2 threads."
    assert path.read_text() == "# A\n" + "\nbetween\n".join(
        f"<!-- t-table{end} -->\n| arm | TTFT ms |\n| --- | ---: |\n| arm {n} | 1,234 |\n\n{measured}\n"
        f"<!-- /t-table{end} -->"
        for n, end in enumerate(("", "-2"))
    ) + "\nend\n"  # fmt: skip


def test_page_that_wants_the_second_table_alone_has_no_place(tmp_path: Path) -> None:
    path, console = tmp_path / "page.md", Console(file=io.StringIO())
    path.write_text("<!-- t-table-2 -->\n<!-- /t-table-2 -->\n")
    page = Page(path, "t")
    page.watch(console)
    for arm in ("first", "second"):
        table = table_with("arm")
        table.add_row(arm)
        console.print(table)
    page.paste(MACHINE)
    assert "second" in path.read_text() and "first" not in path.read_text()


@pytest.mark.parametrize("text", [None, "no place", "<!-- t-table -->"])
def test_page_without_a_place_is_found_out_after_measuring(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "page.md"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="--paste"):
        Page(path, "t")
