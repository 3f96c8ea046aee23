"""Results in files and on pages."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from blendrag.errors import ConfigError
from blendrag.lab.results import pasted
from blendrag.tables import Page, table_with
from paper_machine import MACHINE

END = "\nend\n<!-- t-table --><!-- /t-table -->\n"
PAGE = f"# A\n<!-- t-table -->\nold\n<!-- /t-table -->\nbetween\n<!-- t-table-2 --><!-- /t-table-2 -->{END}"


def test_table_is_pasted_in_its_place_with_what_it_was_measured_on(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(PAGE)

    def show(console: Console) -> None:
        for number in range(3):
            table = table_with("arm", "TTFT ms")
            table.add_row(f"arm {number}", "1,234")
            console.print(table)
        console.print("a note", markup=False)

    results: Any = SimpleNamespace(show=show, to_dict=lambda: {"machine": asdict(MACHINE)})
    pasted("t", path)(results, Console(file=io.StringIO()))
    measured = "Commit 0123456, paper on paper, 2 threads."
    assert path.read_text() == "# A\n" + "\nbetween\n".join(
        f"<!-- t-table{end} -->\n| arm | TTFT ms |\n| --- | ---: |\n| arm {n} | 1,234 |\n\n{measured}\n"
        f"<!-- /t-table{end} -->"
        for n, end in enumerate(("", "-2"))
    ) + END  # fmt: skip


def test_page_may_have_a_place_for_the_second_table_alone(tmp_path: Path) -> None:
    path, console = tmp_path / "page.md", Console(file=io.StringIO())
    path.write_text("<!-- t-table-2 -->\n<!-- /t-table-2 -->\n")
    page = Page(path, "t")
    page.watch(console)
    for arm in ("first", "second"):
        table = table_with("arm")
        table.add_row(arm)
        console.print(table)
    page.paste("measured")
    assert "second" in path.read_text() and "first" not in path.read_text()


@pytest.mark.parametrize(
    "text", [None, "no place", "<!-- t-table -->", "<!-- t-table-1 --><!-- /t-table-1 -->"]
)
def test_page_without_a_place_is_found_out_before_measuring(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "page.md"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="--paste"):
        Page(path, "t")
