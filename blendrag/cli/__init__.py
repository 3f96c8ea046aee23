"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys
from io import TextIOWrapper

from blendrag.errors import MissingDependencyError, needs


def main() -> None:
    """Run the ``blendrag`` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # an answer may have letters that the terminal has not
    try:
        with needs("blendrag[cli]"):
            from blendrag.cli.app import main
    except MissingDependencyError as error:
        sys.exit(f"error: {error}")
    main()
