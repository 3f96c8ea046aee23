"""The files of vectors that Chroma has hnswlib write, and reads without a look at their sizes."""

from __future__ import annotations

import os
import struct
from pathlib import Path

_FILES = {"header.bin", "data_level0.bin", "length.bin", "link_lists.bin"}
_NAMES = "index_metadata.pickle"  # of the vectors, written behind the first ones
_HEADER = struct.Struct("<iQQQQ")  # version, offset, room, vectors, bytes of each
_HEADER_BYTES = 100
_ZEROS = 1 << 20  # bytes written at once


def broken(chroma: Path) -> list[Path]:
    """Return the folders of vectors that have lost a file, or the end of one. From such a folder Chroma finds
    fewer texts, or it ends the process."""
    return [folder for folder in sorted({path.parent for path in chroma.glob("*/*")}) if not _whole(folder)]


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


def _whole(folder: Path) -> bool:
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    if not sizes.keys() >= _FILES or sizes["header.bin"] < _HEADER_BYTES:
        return False
    used = _used(folder / "header.bin")
    return not used or (_NAMES in sizes and sizes["data_level0.bin"] >= used)


def _used(header: Path) -> int | None:
    """Return the bytes of the vectors that there are; None: of a version that is not known."""
    version, _, _, count, size = _HEADER.unpack_from(header.read_bytes())
    return count * size if version == 1 else None
