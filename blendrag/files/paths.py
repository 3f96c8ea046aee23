"""Paths as people name them."""

from __future__ import annotations

import os


def absolute(path: str) -> str:
    """Return a path from the root, with the name that a shell has for the working folder: a link stays one.

    In a working folder that was deleted, the path stays as it is.
    """
    try:
        here = os.environ.get("PWD", "")
        named = os.path.isabs(here) and os.path.samefile(here, ".")
        return os.path.normpath(os.path.join(here, path)) if named else os.path.abspath(path)
    except OSError:
        return path
