"""What ``profile`` says of a machine whose times are known."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from blendrag.cli.profile import _print
from blendrag.settings import Settings
from paper_machine import SPEEDS, make_profile

KV_BYTES = 23_040  # of a token: 30 layers of 3 heads of 64, K and V in bfloat16


@pytest.mark.parametrize(
    ("selector", "lowest"), [("hkvd", "redis: it loads in"), ("query", "every tier adds delay")]
)
def test_lowest_tier_that_adds_no_delay_is_named(selector: str, lowest: str) -> None:
    console, settings = Console(file=StringIO(), width=200), Settings(selector=selector, recompute_ratio=0.15)
    _print(make_profile(selector=selector, kv_bytes=KV_BYTES), settings, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"(mode B): {lowest}" in said
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines()]
    rows = {row[0]: row[-1] for row in cells if row}
    assert set(SPEEDS) <= rows.keys() and rows["ram"] == "0.15"
    assert (float(rows["object"]) > 0.15) == (selector == "hkvd"), "mode A"
