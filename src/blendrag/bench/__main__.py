"""``python -m blendrag.bench``."""

from blendrag.bench.cli import app

app()
