"""``blendrag bench``."""

from blendrag.cli.bench.eviction import eviction
from blendrag.cli.bench.speed import beside, decode, load, speculate, sweep, tree, ttft
from blendrag.cli.console import group

app = group(help="Measure on this machine.")
for command in (eviction, ttft, sweep, load, beside, decode, tree, speculate):
    app.command()(command)

__all__ = ["app"]
