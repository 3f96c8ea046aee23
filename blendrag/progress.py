"""Progress of long work: a bar where someone is watching, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class IngestProgress:
    """Told about documents and tokens as they pass. This one is silent."""

    def note(self, message: str) -> None:
        """Something long begins that has no measure."""

    def document(self, name: str) -> None:
        """A document is being read, split and embedded."""

    def prefill(self, tokens: int, total: int, tokens_per_s: float, nbytes: int) -> None:
        """``tokens`` of ``total`` are prefilled; ``nbytes`` of KV are written."""


class IngestBar(IngestProgress):
    """A rich progress bar on standard error."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID = progress.add_task("starting", total=None)
        self._documents = 0

    def note(self, message: str) -> None:
        self._progress.update(self._task, description=message)

    def document(self, name: str) -> None:
        self._documents += 1
        self._progress.update(self._task, description=f"reading {self._documents} documents")

    def prefill(self, tokens: int, total: int, tokens_per_s: float, nbytes: int) -> None:
        rate = f"{tokens_per_s:,.0f} tokens/s, {nbytes / 2**20:,.0f} MiB of KV"
        self._progress.update(self._task, description=f"prefill: {rate}", total=total, completed=tokens)


@contextmanager
def ingest_progress(show: IngestProgress | bool | None) -> Iterator[IngestProgress]:
    """A bar if ``show``, or if it is None and standard error is a terminal; or the caller's own."""
    if isinstance(show, IngestProgress):
        yield show
        return
    if not (sys.stderr.isatty() if show is None else show):
        yield IngestProgress()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield IngestBar(progress)
