"""The files of vectors that Chroma has hnswlib write, and reads without a look at their sizes."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

from blendrag.errors import StoreError
from blendrag.files import sqlite

_NAMES = "index_metadata.pickle"  # of the vectors, written behind the first ones
_FILES = {"header.bin", "data_level0.bin", "length.bin", "link_lists.bin", _NAMES}
_HEADER = struct.Struct("<iQQQQ")  # version, offset, room, vectors, bytes of each
_HEADER_BYTES = 100
_ZEROS = 1 << 20  # bytes written at once


def broken(chroma: Path) -> list[Path]:
    """Return the folders of vectors that have lost a file, or the end of one. From such a folder Chroma finds
    fewer texts, or it ends the process."""
    folders = sorted({path.parent for path in chroma.glob("*/*")})
    noted = _noted(chroma / "chroma.sqlite3") if folders else set()
    return [folder for folder in folders if not _whole(folder, folder.name in noted)]


def clear_unused(chroma: Path) -> None:
    """Write zeros behind the vectors of files, which have room for more, out of memory of the process that
    hnswlib has never set. Raises OSError."""
    for header in chroma.glob("*/header.bin"):
        used = _used(header)
        if used is None:
            continue
        with (header.parent / "data_level0.bin").open("r+b") as file:
            unused = os.fstat(file.fileno()).st_size - used
            file.seek(used)
            for left in range(unused, 0, -_ZEROS):
                file.write(bytes(min(left, _ZEROS)))


def _noted(database: Path) -> set[str]:
    """Return the folders that Chroma has noted as written: what is in them is no longer in its log."""
    with contextlib.suppress(StoreError), sqlite.opened(database) as db:  # an empty file is no index yet
        return {name for (name,) in db.execute("SELECT segment_id FROM max_seq_id")}
    return set()


def _whole(folder: Path, noted: bool) -> bool:
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    if not noted and _NAMES not in sizes:
        return True  # Chroma makes it anew, from its log
    if not sizes.keys() >= _FILES or sizes["header.bin"] < _HEADER_BYTES:
        return False
    return sizes["data_level0.bin"] >= (_used(folder / "header.bin") or 0)


def _used(header: Path) -> int | None:
    """Return the bytes of the vectors that there are; None: of an unknown version, or not written."""
    data = header.read_bytes()
    if len(data) < _HEADER_BYTES:
        return None
    version, _, _, count, size = _HEADER.unpack_from(data)
    return count * size if version == 1 else None
