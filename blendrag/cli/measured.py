"""Parts of the commands that measure: how they do so, and show what they found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

from blendrag.cli.console import err, interruptible, out, print_json
from blendrag.progress import Progress, progress_bar

if TYPE_CHECKING:
    from blendrag.lab.results import Results

R = TypeVar("R", bound="Results")


def measured(
    work: Callable[[Progress], R],
    table: Callable[[R, Console], None],
    json: bool,
    plot: Path | None = None,
    draw: Callable[[R, Path], None] | None = None,
    interrupted: str = "interrupted",
    paste: Path | None = None,
    name: str = "",
) -> None:
    """Do ``work`` behind a bar, and show its results: a table, and JSON and a picture where they are wanted.

    With JSON on standard output, the table goes to standard error. What cannot be written is refused before
    measuring rather than after. interrupted: what Ctrl-C is answered with. paste: a page whose tables of this
    ``name`` are replaced.
    """
    from blendrag.lab.canvas import check_plot_path
    from blendrag.lab.results import pasted

    shown = pasted(table, name, paste)
    if plot:
        check_plot_path(plot)
    with interruptible(interrupted), progress_bar() as progress:
        results = work(progress)
    if json:
        print_json(results.to_dict())
    shown(results, err() if json else out())
    if plot and draw:
        draw(results, plot)
