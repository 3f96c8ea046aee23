"""Import: an index out of the file that an export made. Nothing in it is believed before it is checked."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import xxhash

from blendrag.errors import ArchiveError, StoreError, StoreFullError
from blendrag.private import make_folder
from blendrag.progress import SILENT, Progress
from blendrag.store.catalogue import Catalogue
from blendrag.store.maintenance import sqlite
from blendrag.store.maintenance.disk import disk_errors
from blendrag.store.maintenance.manifest import (
    DATABASES,
    HEADER,
    MANIFEST,
    MOST_HEADER,
    Header,
    belongs,
    line,
    refuse_code,
)
from blendrag.store.maintenance.tar import Member, read_members


def import_archive(file: Path, folder: Path, *, progress: Progress = SILENT) -> Header:
    """Make the index of an archive, in a new folder, which appears when everything has been checked.

    Raises StoreError if ``folder`` exists, ArchiveError for a damaged or hostile archive, StoreFullError.
    """
    folder = folder.expanduser().absolute()
    if os.path.lexists(folder):
        raise StoreError(f"{str(folder)!r} exists: choose another folder")
    with disk_errors(f"cannot read {str(file)!r}"):
        archive = file.expanduser().open("rb")
    with archive, disk_errors(f"cannot write to {str(folder.parent)!r}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as name:
            root = Path(name) / "index"
            make_folder(root)
            with open(Path(name) / "lines", "x+b") as lines:
                header = _extract(archive, root, lines, progress)
            progress.note("checking")
            _check(root, header)
            os.sync()
            root.rename(folder)
    return header


def _extract(archive: BinaryIO, root: Path, lines: BinaryIO, progress: Progress) -> Header:
    """Write the archive's files; ``lines`` becomes what the manifest should say, and says."""
    members = read_members(archive)
    header = _header(next(members, None), root, lines)
    progress.note("importing")
    progress.total(header.nbytes)
    for member in members:
        if member.name == MANIFEST:
            if not _same(lines, member):
                raise ArchiveError("the archive is damaged: its files are not those that were exported")
            return header
        if not belongs(member.name):
            raise ArchiveError(f"the archive holds {member.name[:100]!r}, which no index has")
        path = root / member.name
        for above in reversed(path.parents):
            if above.is_relative_to(root):
                make_folder(above)
        checksum = _write(path, member.pieces)
        lines.write(line(checksum, member.size, member.name))
        progress.advance(member.size)
    raise ArchiveError("the archive is cut off: it has no list of its files")


def _header(member: Member | None, root: Path, lines: BinaryIO) -> Header:
    if member is None or member.name != HEADER or member.size > MOST_HEADER:
        raise ArchiveError("no export of an index: blendrag export makes them")
    text = b"".join(member.pieces)
    lines.write(line(xxhash.xxh3_128_hexdigest(text), len(text), HEADER))
    header = Header.decode(text)
    free = shutil.disk_usage(root).free
    if header.nbytes > free:
        raise StoreFullError(
            f"the index takes {header.nbytes / 2**20:,.0f} MiB, and {str(root.parent.parent)!r} has"
            f" {free / 2**20:,.0f} MiB free"
        )
    return header


def _write(path: Path, pieces: Iterator[bytes]) -> str:
    """Write a new file; its checksum."""
    digest = xxhash.xxh3_128()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ArchiveError(f"the archive holds {path.name!r} twice") from None
    with os.fdopen(descriptor, "wb") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def _same(lines: BinaryIO, manifest: Member) -> bool:
    if lines.tell() != manifest.size:
        return False
    lines.seek(0)
    return all(lines.read(len(piece)) == piece for piece in manifest.pieces)


def _check(root: Path, header: Header) -> None:
    """Raises ArchiveError if the files are not an index, or more than data."""
    for path in root.glob("chroma/*/*.pickle"):
        refuse_code(path)
    for name in DATABASES:
        if (root / name).exists() and (problem := sqlite.suspicious(root / name)):
            raise ArchiveError(f"{name} in the archive {problem}")
    try:
        with contextlib.closing(Catalogue.open(root, None)) as catalogue:
            if (catalogue.identity, catalogue.dtype) != (header.identity, header.dtype):
                raise ArchiveError("the archive's header is not that of its catalogue")
            catalogue.totals()
    except ArchiveError:
        raise
    except StoreError as error:
        raise ArchiveError(f"the archive's catalogue cannot be used: {error}") from error
