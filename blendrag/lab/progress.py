"""A bar on standard error where someone is watching."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class BenchProgress:
    """Told what is being done. This one is silent."""

    def total(self, steps: int) -> None:
        """So many steps more than were told before."""

    def note(self, message: str) -> None:
        """What is being done now."""

    def step(self) -> None:
        """One step is done."""


class BenchBar(BenchProgress):
    """A rich progress bar."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task, self._total = progress.add_task("starting", total=None), 0

    def total(self, steps: int) -> None:
        self._total += steps
        self._progress.update(self._task, total=self._total)

    def note(self, message: str) -> None:
        self._progress.update(self._task, description=message)

    def step(self) -> None:
        self._progress.advance(self._task)


@contextmanager
def bench_progress() -> Iterator[BenchProgress]:
    """A bar if standard error is a terminal. It redraws twice a second: drawing costs the measured cores."""
    if not sys.stderr.isatty():
        yield BenchProgress()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as progress:
        yield BenchBar(progress)
