"""What a command has to show: a table that fits into 80 columns, a picture that is legible on any page."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console

Case = tuple[Any, tuple[str, ...]]  # results, and texts that their table has


def check_case(case: Case, folder: Path) -> None:
    """The table of these results says all of the texts, and the machine; the picture is legible."""
    results, texts = case
    check_table(results.show, *texts, "A CPU [model]")
    results.draw(folder / "out.png")
    check_picture(folder / "out.png")


def check_table(table: Callable[[Console], None], *shown: str) -> None:
    """``table`` cuts nothing off, and says all of ``shown``, whatever the spaces."""
    printed = io.StringIO()
    table(Console(file=printed, width=80))
    text = printed.getvalue()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert all(part in " ".join(text.split()) for part in shown)


def check_picture(path: Path) -> None:
    """There is something on opaque white."""
    picture = Image.open(path).convert("RGBA")
    assert picture.getextrema()[3] == (255, 255)
    assert picture.getpixel((0, 0)) == (255, 255, 255, 255)
    assert len(picture.getcolors(picture.width * picture.height)) > 5
