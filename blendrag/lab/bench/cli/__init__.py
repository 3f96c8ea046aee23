"""``blendrag bench``."""

from blendrag.lab.bench.cli import (  # noqa: F401  # each adds its commands
    inside,
    one_request,
    replayed,
    under_load,
)
from blendrag.lab.bench.cli.shared import app

__all__ = ["app"]
