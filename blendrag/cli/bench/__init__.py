"""``blendrag bench``."""

from blendrag.cli.bench import (  # noqa: F401  # each adds its commands
    inside,
    one_request,
    replayed,
    under_load,
)
from blendrag.cli.bench.shared import app

__all__ = ["app"]
