"""The ``blendrag`` command."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from typing import Annotated, Any

import typer

from blendrag import __version__
from blendrag.cli.ask import ask
from blendrag.cli.bench import app as bench
from blendrag.cli.console import group, say
from blendrag.cli.demo import demo
from blendrag.cli.doctor import doctor
from blendrag.cli.eval import evaluate
from blendrag.cli.fit import fit
from blendrag.cli.ingest import ingest
from blendrag.cli.maintenance import gc, purge, verify
from blendrag.cli.profile import profile
from blendrag.cli.serve import ANY_OPTION, serve
from blendrag.cli.stats import stats
from blendrag.cli.sync import sync
from blendrag.errors import BlendragWarning

app = group("blendrag", "Answer questions from documents without prefilling the documents again.")
for command in (ingest, sync, ask, stats, verify, gc, purge, profile, fit, doctor, demo):
    app.command()(command)
app.command(context_settings=ANY_OPTION)(serve)
app.command("eval")(evaluate)
app.add_typer(bench, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"blendrag {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options of the command itself."""


def main() -> None:
    """Run the ``blendrag`` command."""
    written = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **to: Any) -> None:
        if issubclass(category, BlendragWarning):  # for the user, who has no use for a line of our source
            say(f"warning: {message}")
        else:
            written(message, category, *where, **to)

    warnings.showwarning = show
    try:
        app()
    except OSError as error:  # such as a full disk behind standard output, or a name that is too long
        with contextlib.suppress(OSError):
            say(f"error: {error}")
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)  # what is left to be printed would fail again
        sys.exit(1)
