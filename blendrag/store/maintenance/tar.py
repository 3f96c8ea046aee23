"""The plainest kind of tar file: regular files one after another, read strictly and in constant memory.

``tarfile`` extracts whatever an archive says (links, devices, extended headers of any length) and remembers
every member. Here it only packs and unpacks the 512 bytes of a header; all else is refused.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import xxhash

from blendrag.errors import ArchiveError

BLOCK = tarfile.BLOCKSIZE
PIECE = 1 << 20
_LONGEST_NAME = 99  # of GNU tar, without an extra header


def write_member(archive: BinaryIO, name: str, size: int, pieces: Iterable[bytes]) -> str:
    """Append a file of ``size`` bytes; its checksum. Raises ArchiveError if the pieces are more or fewer."""
    assert len(name.encode()) <= _LONGEST_NAME, name
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    archive.write(info.tobuf(tarfile.GNU_FORMAT))
    digest, written = xxhash.xxh3_128(), 0
    for piece in pieces:
        digest.update(piece)
        archive.write(piece)
        written += len(piece)
    if written != size:
        raise ArchiveError(f"{name} changed while it was being exported: export again")
    archive.write(b"\0" * (-size % BLOCK))
    return digest.hexdigest()


def write_end(archive: BinaryIO) -> None:
    """What every tar file ends with."""
    archive.write(b"\0" * (2 * BLOCK))


@dataclass(frozen=True, slots=True)
class Member:
    """A file in an archive. ``pieces`` are read from the archive as they are asked for, once."""

    name: str
    size: int
    pieces: Iterator[bytes]


def read_members(archive: BinaryIO) -> Iterator[Member]:
    """The files of an archive, in order. Raises ArchiveError for anything but regular files."""
    while any(header := _exactly(archive, BLOCK)):
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
        except (tarfile.TarError, ValueError) as error:
            raise ArchiveError(f"not an uncompressed tar file, or a damaged one: {error}") from error
        if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or info.size < 0:
            raise ArchiveError(f"the archive holds {info.name[:100]!r}, which is no regular file")
        pieces = _pieces(archive, info.size)
        yield Member(info.name, info.size, pieces)
        for _ in pieces:  # what the caller left unread
            pass
        _exactly(archive, -info.size % BLOCK)


def _pieces(archive: BinaryIO, size: int) -> Iterator[bytes]:
    while size:
        piece = _exactly(archive, min(PIECE, size))
        size -= len(piece)
        yield piece


def _exactly(archive: BinaryIO, size: int) -> bytes:
    data = archive.read(size)
    if len(data) < size:
        raise ArchiveError("the archive is cut off")
    return data
