"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

from blendrag.errors import MissingDependencyError, needs


def main() -> None:
    """Run the ``blendrag`` command."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # who called has closed it; no other file may get its number
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # an answer may have letters that the terminal has not
    try:
        with needs("blendrag[cli]"):
            from blendrag.cli.app import main
    except MissingDependencyError as error:
        sys.exit(f"error: {error}")
    main()
