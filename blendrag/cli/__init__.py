"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys

from blendrag.errors import MissingDependencyError, needs


def main() -> None:
    """Run the ``blendrag`` command."""
    try:
        with needs("blendrag[cli]"):
            from blendrag.cli.app import main
    except MissingDependencyError as error:
        sys.exit(f"error: {error}")
    main()
