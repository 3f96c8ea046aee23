"""Parts that commands which measure have in common: results as JSON, and their tables on pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console

from blendrag.machine import Machine
from blendrag.tables import Page


class Results(Protocol):
    """The results of a command that measures. ``to_dict``: for JSON; of an engine, with its ``machine``."""

    def to_dict(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=Results)


def pasted(table: Callable[[R, Console], None], name: str, path: Path | None) -> Callable[[R, Console], None]:
    """Return a ``table`` whose tables are pasted into a page, too, if there is one. Raises ConfigError if it
    has no place for any."""
    if path is None:
        return table
    page = Page(path, name)

    def show(results: R, console: Console) -> None:
        page.watch(console)
        table(results, console)
        machine = Machine(**results.to_dict()["machine"])
        page.paste(f"Commit {str(machine.commit)[:7]}, {where(machine)}.")

    return show


def where(machine: Machine) -> str:
    """Return a machine in a line, for a footnote."""
    return f"{Path(machine.model).name} on {machine.cpu}, {machine.threads} threads"
