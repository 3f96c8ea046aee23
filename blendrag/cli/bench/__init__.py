"""``blendrag bench``."""

from blendrag.cli.bench.eviction import eviction
from blendrag.cli.bench.speed import beside, context, decode, kernels, load, speculate, sweep, tree, ttft
from blendrag.cli.console import group

app = group(help="Measure on this machine.")
for command in (eviction, ttft, sweep, load, beside, decode, tree, speculate, kernels, context):
    app.command()(command)

__all__ = ["app"]
