"""``blendrag bench``."""

from blendrag.cli.bench import eviction, speed  # noqa: F401  # each adds its commands
from blendrag.cli.bench.shared import app

__all__ = ["app"]
