"""Folders and files that hold people's texts: made for this user only. What exists already is left alone."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def make_folder(path: Path) -> None:
    """Make a folder of mode 0700, and those above it as usual. Raises OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def can_make(folder: Path) -> bool:
    """Return whether this user may write to a folder, or make it."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def make_file(path: Path) -> None:
    """Make an empty file of mode 0600, as SQLite's other files then have too. Raises OSError if an existing
    one cannot be written to.

    One that can is not opened: to close it would end all locks that this process has on it, and with them
    SQLite's, by which another process knows that the database is in use.
    """
    if path.is_file() and os.access(path, os.W_OK):
        return
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def write_whole(path: Path, *parts: bytes | memoryview, beside: Path | None = None) -> None:
    """Put a file of mode 0600 in place of what is there, wholly or not at all. beside: the folder that has it
    until it is whole; None: its own. Raises OSError."""
    descriptor, temporary = tempfile.mkstemp(dir=beside or path.parent, prefix=f".{path.stem}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
