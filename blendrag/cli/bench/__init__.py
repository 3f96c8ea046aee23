"""``blendrag bench``."""

import typer

from blendrag.cli.bench.eviction import eviction
from blendrag.cli.bench.speed import beside, kernels, load, sweep, ttft
from blendrag.cli.console import Commands

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure on this machine.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (eviction, ttft, sweep, load, beside, kernels):
    app.command()(command)

__all__ = ["app"]
