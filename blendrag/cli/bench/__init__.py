"""The command ``blendrag bench``."""

from blendrag.cli.bench.eviction import eviction
from blendrag.cli.bench.recognition import recognition
from blendrag.cli.bench.speed import load, tree, ttft
from blendrag.cli.console import group

app = group(help="Measure on this machine.")
for command in (ttft, load, tree, eviction, recognition):
    app.command()(command)

__all__ = ["app"]
