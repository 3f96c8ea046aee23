"""Files that are written for a measurement, and read cold."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from blendrag.errors import StoreError
from blendrag.settings import Settings
from blendrag.store.stack import TierSpec


@contextlib.contextmanager
def temporary_folder(settings: Settings, spec: TierSpec) -> Iterator[Path]:
    """A folder for a while, on the disk that the tier uses: its own, else the one with the cache folder."""
    beside = (spec.path or settings.cache_dir).expanduser()
    try:
        beside.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".blendrag-", dir=beside, ignore_cleanup_errors=True) as name:
            yield Path(name)
    except OSError as error:
        raise StoreError(f"cannot write to {str(beside)!r}: {error.strerror}") from error


def drop_page_cache(folder: Path) -> None:
    """Have the system forget the contents of the files in ``folder``, where it can: they were all synced."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
