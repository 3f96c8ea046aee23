"""``blendrag bench``."""

from blendrag.bench.cli import inside, one_request, under_load  # noqa: F401  # each adds its commands
from blendrag.bench.cli.shared import app

__all__ = ["app"]
