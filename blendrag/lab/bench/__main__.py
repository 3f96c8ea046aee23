"""``python -m blendrag.lab.bench``."""

from blendrag.lab.bench.cli import app

app()
