"""What the commands share: their options, and how results are measured and shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console

from blendrag.cli.console import Commands, err, interruptible, out, print_json
from blendrag.progress import Progress, progress_bar

if TYPE_CHECKING:
    from blendrag.lab.report import Results

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure on this machine.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

R = TypeVar("R", bound="Results")

Plot = Annotated[Path | None, typer.Option(help="Draw the results: .png, .svg or .pdf.", metavar="FILE")]
Paste = Annotated[
    Path | None, typer.Option(help="Put the tables between their markers in a Markdown page.", metavar="FILE")
]
Data = Annotated[Path | None, typer.Option(help="Text or JSONL file to take chunks from.", metavar="FILE")]
Chunks = Annotated[int, typer.Option(min=2, help="Chunks in a prompt.")]
ChunkTokens = Annotated[int, typer.Option(min=8, help="Tokens in a chunk.")]
Ratio = Annotated[float, typer.Option(min=0.0, max=1.0, help="Recompute ratio.")]
Seed = Annotated[int, typer.Option(help="Of the random choice and order of chunks.")]


@app.callback()
def bench() -> None:
    """Measure on this machine."""


def measured(
    work: Callable[[Progress], R],
    table: Callable[[R, Console], None],
    json: bool,
    plot: Path | None = None,
    draw: Callable[[R, Path], None] | None = None,
    interrupted: str = "interrupted",
    paste: tuple[str, Path | None] = ("", None),
) -> R:
    """Do ``work`` behind a bar, and show its results: a table, JSON, a picture and in a page where they are
    wanted.

    With JSON on standard output, the table goes to standard error. What cannot be written is refused before
    measuring rather than after. interrupted: what Ctrl-C
    is answered with. paste: what the tables are called there, and the page.
    """
    from blendrag.lab.canvas import check_plot_path
    from blendrag.lab.report import Page, plain

    if plot:
        check_plot_path(plot)
    name, path = paste
    page = Page(path, name) if path else None
    with interruptible(interrupted), progress_bar() as progress:
        results = work(progress)
    if json:
        print_json(plain(results))
    console = err() if json else out()
    if page:
        page.watch(console)
    table(results, console)
    if page:
        page.paste(plain(results)["machine"])
    if plot and draw:
        draw(results, plot)
    return results
