"""Tables for people, which can be pasted into Markdown pages, too."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleRenderable, RenderHook
from rich.table import Table

from blendrag.errors import ConfigError

_MAX_TABLES = 9  # of a command


def table_with(first: str, *columns: str, title: str = "") -> Table:
    """Return an empty table: the first column to the left, the others, numbers, to the right."""
    table = Table(title=title or None, title_justify="left")
    table.add_column(first, overflow="fold")  # a name cut short would be another one
    for column in columns:
        table.add_column(column, justify="right")
    return table


def markdown(table: Table) -> str:
    """Return a table of texts as Markdown has it."""
    marks = ["---:" if column.justify == "right" else "---" for column in table.columns]
    cells = zip(*(column.cells for column in table.columns), strict=True)
    rows: list[Iterable[Any]] = [[column.header for column in table.columns], marks, *cells]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


class Page(RenderHook):
    """A Markdown page that the tables of a command are pasted into: the first between ``<!-- NAME-table -->``
    and ``<!-- /NAME-table -->``, the second ``NAME-table-2``."""

    def __init__(self, path: Path, name: str) -> None:
        """Read the page. name: the command's. Raises ConfigError if it cannot be read, or has no place for a
        table."""
        self._path, self._name, self._tables = path, name, list[Table]()
        self._places()

    def watch(self, console: Console) -> None:
        """Note every table that is printed on this console."""
        console.push_render_hook(self)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        self._tables += [each for each in renderables if isinstance(each, Table)]
        return renderables

    def paste(self, note: str) -> None:
        """Write the page, with the note below each table."""
        text = self._places()
        for number, table in enumerate(self._tables, start=1):
            begin, end = self._markers(number)
            before, found, rest = text.partition(begin)
            _, closed, after = rest.partition(end)
            if found and closed:
                text = f"{before}{begin}\n{markdown(table)}\n\n{note}\n{end}{after}"
        self._path.write_text(text, encoding="utf-8")

    def _markers(self, number: int) -> tuple[str, str]:
        place = f"{self._name}-table" + (f"-{number}" if number > 1 else "")
        return f"<!-- {place} -->", f"<!-- /{place} -->"

    def _places(self) -> str:
        try:
            text = self._path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--paste {self._path}: {error.strerror}") from error
        places = [self._markers(number) for number in range(1, _MAX_TABLES + 1)]
        if not any(begin in text and end in text for begin, end in places):
            begin, end = places[0]
            raise ConfigError(f"--paste {self._path}: there is no {begin} with its {end} in it")
        return text
