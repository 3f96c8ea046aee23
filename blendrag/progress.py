"""Progress of long work: a bar where someone is watching, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from blendrag.errors import MissingDependencyError, needs

if TYPE_CHECKING:
    from rich.progress import Progress as Bars


class Progress:
    """A listener that is told what is being done, how much there is of it, and how much is done. This one is
    silent."""

    def note(self, what: str) -> None:
        """Say what is being done now."""

    def total(self, amount: int) -> None:
        """Add to what there is to do: steps, tokens or bytes."""

    def advance(self, amount: int = 1) -> None:
        """Add to what is done."""


SILENT = Progress()


class Notes(Progress):
    """A listener that hands on what is being done, and no amounts: beside a bar that counts other things."""

    def __init__(self, tell: Callable[[str], Any]) -> None:
        self._tell = tell

    def note(self, what: str) -> None:
        self._tell(what)


class ProgressBar(Progress):
    """A progress bar drawn by rich."""

    def __init__(self, bars: Bars) -> None:
        self._bars, self._task = bars, bars.add_task("starting", total=None)
        self._total = 0

    def note(self, what: str) -> None:
        self._bars.update(self._task, description=what)

    def total(self, amount: int) -> None:
        self._total += amount
        self._bars.update(self._task, total=self._total)

    def advance(self, amount: int = 1) -> None:
        self._bars.advance(self._task, amount)


@contextmanager
def progress_bar(
    show: Progress | bool | None = None, unit: Literal["steps", "bytes"] = "steps"
) -> Iterator[Progress]:
    """Show a bar on standard error, or tell a listener of the caller's own.

    show: the listener, or whether there is a bar; None: if standard error is a terminal and rich is there.
    Raises MissingDependencyError for True without rich.

    It redraws twice a second: drawing takes time from cores that compute.
    """
    if isinstance(show, Progress):
        yield show
        return
    if not (sys.stderr and sys.stderr.isatty() if show is None else show):
        yield SILENT
        return
    try:
        with needs("blendrag[cli]"):
            from rich import progress as rich
            from rich.console import Console
    except MissingDependencyError:
        if show:
            raise
        yield SILENT
        return

    by_unit = {
        "steps": (rich.TimeElapsedColumn(), rich.TimeRemainingColumn()),
        "bytes": (rich.DownloadColumn(binary_units=True), rich.TransferSpeedColumn()),
    }
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), *by_unit[unit])
    console = Console(file=sys.stderr, highlight=False)
    with rich.Progress(*columns, console=console, transient=True, refresh_per_second=2) as bars:
        yield ProgressBar(bars)
