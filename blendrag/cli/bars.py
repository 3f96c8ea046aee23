"""A bar for long work on files, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from blendrag.store.maintenance.progress import SILENT, CareProgress


@contextmanager
def care_bar() -> Iterator[CareProgress]:
    """A bar where someone is watching, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield SILENT
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from blendrag.cli.console import err

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    with Progress(*columns, console=err(), transient=True) as progress:
        task = progress.add_task("opening", total=None)

        class Bar(CareProgress):
            def note(self, what: str) -> None:
                progress.update(task, description=what)

            def expect(self, nbytes: int) -> None:
                progress.update(task, total=nbytes)

            def advance(self, nbytes: int) -> None:
                progress.advance(task, nbytes)

        yield Bar()
