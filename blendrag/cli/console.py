"""Parts that all commands share: where things are printed, and how an error ends a command."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer
from rich.console import Console
from rich.rule import Rule
from typer.core import TyperGroup

from blendrag.errors import BlendragError, needs
from blendrag.files.paths import absolute
from blendrag.progress import Progress, progress_bar

if TYPE_CHECKING:
    from blendrag.lab.results import Results
    from blendrag.serving.prefill import PrefillReport

_WIDE, _PAGE = 1000, 80  # columns
# Former commands, each with what became of it.
_RENAMED = {
    "chat": "'blendrag ask' without a question",
    "tree": "'stats --tree', 'gc --tree' and 'ingest --questions'",
    "export": "'tar', of the folder of a closed index,",
    "import": "'tar -x', where an index's folder was packed with 'tar',",
    "plan": "what 'blendrag profile' says of tiers",
    "sweep": "'bench ttft --axis'",
    "beside": "'bench load --beside'",
    "decode": "'bench load --kv-budget'",
    "speculate": "'bench ttft --speculate'",
}
INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def out() -> Console:
    """Return the console of results."""
    return _console(sys.stdout)


def err() -> Console:
    """Return the console of notes, bars and errors, which never mix with results that a script reads."""
    return _console(sys.stderr)


def _console(file: TextIO) -> Console:
    """Return a console that cuts off no column where nobody looks, and nobody said how wide it is."""
    narrow = file.isatty() or os.environ.get("COLUMNS", "0") != "0"
    return Console(file=file, highlight=False, width=None if narrow else _WIDE)


def heading(title: str, console: Console) -> None:
    """Print a rule of at most a page's width, where lines may be longer."""
    console.print(Rule(title, align="left"), width=min(console.width, _PAGE))


def say(message: str) -> None:
    """Print a note on standard error, as it is: brackets in it are not markup."""
    err().print(message, markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2, default=str, allow_nan=False))


def say_prefilled(report: PrefillReport) -> None:
    """Print what was prefilled, if anything was."""
    if report.chunks:
        typer.echo(
            f"{report.tokens:,} tokens in {report.chunks:,} chunks prefilled at"
            f" {report.tokens_per_s:,.0f} tokens/s; {report.nbytes / 2**20:,.0f} MiB of KV written"
        )


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """End the command with one line and exit code 130 on Ctrl-C.

    The terminal interrupts the engine's processes as well, so what an interrupt looks like here may be a
    failing engine: that is the interrupt's doing, not an error of its own.
    """
    try:
        yield
    except (KeyboardInterrupt, BlendragError) as error:
        if not _from_interrupt(error):
            raise
        say(message)
        raise typer.Exit(INTERRUPTED) from None


def _from_interrupt(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


class Commands(TyperGroup):
    """A group whose commands end with one clear line instead of a traceback."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in _RENAMED and args[0] not in self.commands:
            ctx.fail(f"{args[0]!r} is {_RENAMED[args[0]]} now")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            with interruptible("interrupted"), needs("blendrag[engine,index]"):
                return super().invoke(ctx)
        except BlendragError as error:
            say(f"error: {error}")
            raise typer.Exit(1) from None


def group(name: str | None = None, help: str | None = None) -> typer.Typer:
    """Return a command that has others below it."""
    return typer.Typer(
        name=name,
        help=help,
        cls=Commands,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def shown(source: str) -> str:
    """Return a source's name for people: files below the working folder without it."""
    from blendrag.serving.owners import readable

    try:
        return str(Path(source).relative_to(absolute(".")))
    except ValueError:
        return readable(source)


def measured(
    work: Callable[[Progress], Results],
    json: bool,
    name: str = "",
    plot: Path | None = None,
    paste: Path | None = None,
    interrupted: str = "interrupted",
) -> None:
    """Do ``work`` behind a bar, and show its results: a table, and JSON and a picture where they are wanted.

    With JSON on standard output, the table goes to standard error. What cannot be written is refused before
    measuring rather than after. paste: a page whose tables of this ``name`` are replaced. interrupted: what
    Ctrl-C is answered with.
    """
    from blendrag.lab.canvas import check_plot_path
    from blendrag.lab.results import pasted

    shown = pasted(name, paste)
    if plot:
        check_plot_path(plot)
    with interruptible(interrupted), progress_bar() as progress:
        results = work(progress)
    if json:
        print_json(results.to_dict())
    shown(results, err() if json else out())
    if plot:
        results.draw(plot)
