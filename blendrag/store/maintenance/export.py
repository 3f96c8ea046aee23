"""Export: a whole index as one file, to be moved to another machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from blendrag.errors import StoreError
from blendrag.progress import SILENT, Progress
from blendrag.store.maintenance import sqlite
from blendrag.store.maintenance.disk import disk_errors
from blendrag.store.maintenance.folder import ClosedIndex
from blendrag.store.maintenance.manifest import DATABASES, HEADER, MANIFEST, Header, belongs, line
from blendrag.store.maintenance.tar import PIECE, write_end, write_member
from blendrag.version import __version__


def export_index(index: ClosedIndex, file: Path, *, kv: bool = True, progress: Progress = SILENT) -> Header:
    """Write the index into a new tar file, which appears when it is complete. kv: False leaves KV out: an
    ingest computes it again.

    Raises StoreError if ``file`` exists or cannot be written, StoreFullError.
    """
    file = file.expanduser().resolve()
    if file.exists():
        raise StoreError(f"{str(file)!r} exists: choose another name")
    with (
        disk_errors(f"cannot write {str(file)!r}"),
        TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as name,
    ):
        folder = Path(name)
        progress.note("copying the databases")
        files = _small_files(index, folder)
        totals = _settle(folder / "catalogue.sqlite", index, kv)
        size = totals.bytes + sum(path.stat().st_size for path in files.values())
        catalogue = index.catalogue
        header = Header(__version__, catalogue.identity, catalogue.dtype, kv, totals.files + len(files), size)
        progress.note("exporting")
        progress.total(size)
        archive_path = folder / "archive"
        with archive_path.open("xb") as archive, (folder / "manifest").open("x+b") as manifest:
            os.chmod(archive_path, 0o600)
            encoded = header.encode()
            checksum = write_member(archive, HEADER, len(encoded), [encoded])
            manifest.write(line(checksum, len(encoded), HEADER))
            for member, path in files.items():
                _add(archive, manifest, member, path, progress)
            if kv:
                for member, path in _records(index):
                    _add(archive, manifest, member, path, progress)
            length = manifest.tell()
            manifest.seek(0)
            write_member(archive, MANIFEST, length, _pieces(manifest))
            write_end(archive)
            archive.flush()
            os.fsync(archive.fileno())
        os.link(archive_path, file)  # unlike a renaming, this overwrites nothing
    return header


@dataclass(slots=True)
class _Totals:
    files: int = 0
    bytes: int = 0


def _small_files(index: ClosedIndex, folder: Path) -> dict[str, Path]:
    """By name in the archive: copies of the databases, and the vectors' files."""
    files: dict[str, Path] = {}
    for name in DATABASES:
        if (index.root / name).is_file():
            files[name] = folder / Path(name).name
            sqlite.copy(index.root / name, files[name])
    for path in sorted((index.root / "chroma").glob("*/*")):
        name = path.relative_to(index.root).as_posix()
        if belongs(name) and path.is_file() and not path.is_symlink():
            files[name] = path
    return files


def _settle(catalogue: Path, index: ClosedIndex, kv: bool) -> _Totals:
    """Make the copied catalogue say what the archive will hold, and nothing of this machine's deletions."""
    totals = _Totals()
    with sqlite.opened(catalogue) as db:
        db.execute("BEGIN")
        db.execute("DELETE FROM doomed")
        if not kv:
            db.execute("UPDATE records SET state = 'pending', bytes = 0 WHERE state = 'ready'")
        else:
            for shard, records in index.kv.shards():
                ready = index.catalogue.ready_from(shard)
                there = records.keys() & ready
                totals.files += len(there)
                totals.bytes += sum(records[key] for key in there)
                db.executemany(
                    "UPDATE records SET state = 'pending', bytes = 0 WHERE key = ?",
                    [(key,) for key in ready - there],
                )
        db.execute("COMMIT")
    return totals


def _records(index: ClosedIndex) -> Iterator[tuple[str, Path]]:
    for shard, records in index.kv.shards():
        for key in sorted(records.keys() & index.catalogue.ready_from(shard)):
            path = index.kv.path(key)
            yield path.relative_to(index.root).as_posix(), path


def _add(archive: BinaryIO, manifest: BinaryIO, name: str, path: Path, progress: Progress) -> None:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        checksum = write_member(archive, name, size, _pieces(file))
    manifest.write(line(checksum, size, name))
    progress.advance(size)


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(PIECE):
        yield piece
