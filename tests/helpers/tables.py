"""Tables in Markdown that grow by a row at a time."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console, ConsoleRenderable, RenderHook
from rich.table import Table
from rich.text import Text

from blendrag.tables import markdown


class Tables:
    """Written to ``file`` as rows come: of a run that is cut off, what it has found is kept. console: for
    tables that are printed whole."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._columns = file, [""]
        self.console = Console(file=file, width=1000)
        self.console.push_render_hook(_AsMarkdown())

    def add(self, **cells: str) -> None:
        """A row of the last table, or of a new one for other columns. ``_`` stands for a blank."""
        if list(cells) != self._columns:
            self._columns = list(cells)
            headings = [name.replace("_", " ") for name in cells]
            print(f"\n{_line(headings)}\n{_line(['---', *['---:'] * (len(cells) - 1)])}", file=self._file)
        print(_line(list(cells.values())), file=self._file, flush=True)


class _AsMarkdown(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [Text(f"\n{markdown(each)}\n") if isinstance(each, Table) else each for each in renderables]


def _line(cells: list[str]) -> str:
    whole = (" ".join(cell.split()).replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(whole)} |"
