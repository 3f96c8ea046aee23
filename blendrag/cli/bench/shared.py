"""What the commands share: their options, and how results are measured and shown."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from blendrag.cli.console import Commands, err, interruptible, out
from blendrag.lab.progress import BenchProgress, bench_progress

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure on this machine.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Results = dict[str, Any]

Json = Annotated[
    str | None, typer.Option(help="Write the results as JSON; - for standard output.", metavar="FILE")
]
Plot = Annotated[Path | None, typer.Option(help="Draw the results: .png, .svg or .pdf.", metavar="FILE")]
Data = Annotated[Path | None, typer.Option(help="Text or JSONL file to take chunks from.", metavar="FILE")]
Chunks = Annotated[int, typer.Option(min=2, help="Chunks in a prompt.")]
ChunkTokens = Annotated[int, typer.Option(min=8, help="Tokens in a chunk.")]
Ratio = Annotated[float, typer.Option(min=0.0, max=1.0, help="Recompute ratio.")]
Seed = Annotated[int, typer.Option(help="Of the random choice and order of chunks.")]


@app.callback()
def bench() -> None:
    """Measure on this machine."""


def measured(
    work: Callable[[BenchProgress], Results],
    table: Callable[[Results, Console], None],
    json: str | None,
    plot: Path | None = None,
    draw: Callable[[Results, Path], None] | None = None,
    interrupted: str = "interrupted",
) -> Results:
    """Do ``work`` behind a bar, and show its results: a table, JSON and a picture where they are wanted.

    With JSON on standard output, the table goes to standard error. What cannot be written is refused before
    measuring rather than after; results are in their file before anything is shown. interrupted: what Ctrl-C
    is answered with.
    """
    from blendrag.lab.bench.plot import check_plot_path
    from blendrag.lab.report import check_json_path, to_json, write_json

    if plot:
        check_plot_path(plot)
    if json and json != "-":
        check_json_path(Path(json))
    with interruptible(interrupted), bench_progress() as progress:
        results = work(progress)
    if json == "-":
        sys.stdout.write(to_json(results))
    elif json:
        write_json(results, Path(json))
    table(results, err() if json == "-" else out())
    if plot and draw:
        draw(results, plot)
    return results
