"""The table of docs/models.md, a row for each of the small models."""

from __future__ import annotations

import os

from blendrag.lab.doctor import DoctorReport
from model_shapes import SHAPES
from places import DOCS
from small_model import Shape

UPDATE = "UPDATE_MODELS"
PAGE = DOCS / "models.md"
_BEGIN, _END = "<!-- table: models -->\n", "<!-- end -->"
_HEAD = "| models | class in vLLM | served | besides the causal mask |\n|---|---|---|---|\n"


def check_page(shape: Shape, report: DoctorReport) -> None:
    """Compares the shape's row in docs/models.md with the report."""
    reason = (report.unsupported or "").partition(" (")[0]  # without what was measured
    plain = "exact prefixes, with states" if report.exact else f"plainly: {reason}"
    served = f"blended, layers {report.layers}" if report.layers else plain
    row = f"| {shape.title} | `{report.architecture}` | {served} | {', '.join(report.attention)} |"
    if os.environ.get(UPDATE):
        _write(shape, row)
    hint = f"docs/models.md is out of date: run tests/unit/engine/test_structures.py with {UPDATE}=1"
    assert rows().get(shape.title) == row, hint


def rows() -> dict[str, str]:
    """The page's table, by title."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN + _HEAD)
    return {line.split(" | ")[0].removeprefix("| "): line for line in rest.partition(_END)[0].splitlines()}


def _write(shape: Shape, row: str) -> None:
    """Only this row; those of shapes that are gone are dropped."""
    page, known = PAGE.read_text(encoding="utf-8"), rows() | {shape.title: row}
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    assert begin and end, "the page has a place for the table"
    table = "".join(f"{known[each.title]}\n" for each in SHAPES if each.title in known)
    PAGE.write_text(f"{before}{begin}{_HEAD}{table}{end}{after}", encoding="utf-8")
