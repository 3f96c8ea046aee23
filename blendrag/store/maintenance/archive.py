"""An index as one tar file, to be moved to another machine.

Its first file is a header, its last one a manifest: a line per file, "checksum size name". Nothing in an
archive is believed before it is checked.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickletools
import re
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import xxhash

from blendrag.errors import ArchiveError, StoreError, StoreFullError
from blendrag.private import make_file, make_folder
from blendrag.progress import SILENT, Progress
from blendrag.store import sqlite
from blendrag.store.catalogue import Catalogue
from blendrag.store.identity import KVIdentity
from blendrag.store.maintenance.closed_index import DATABASES, ClosedIndex, disk_errors
from blendrag.version import __version__

HEADER, MANIFEST = "blendrag.json", "manifest.txt"
_FORMAT = 1
_MOST_HEADER = 1 << 16
_PIECE = 1 << 20  # bytes that are copied at once
_VECTORS = re.compile(r"chroma/[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}/[a-z_0-9]+\.(bin|pickle)")
_KV = re.compile(r"kv/([0-9a-f]{2})/\1[0-9a-f]{30}\.safetensors")
# What numbers, texts, lists and dictionaries are written with; nothing that names or calls anything.
_DATA_ONLY = re.compile(
    r"PROTO|FRAME|STOP|MARK|MEMOIZE|(LONG_)?BIN(PUT|GET)|NONE|NEW(TRUE|FALSE)|BININT[12]?|LONG[14]|BINFLOAT"
    r"|(SHORT_)?BINUNICODE8?|(SHORT_)?BINBYTES8?|EMPTY_(DICT|LIST|TUPLE|SET)|SETITEMS?|APPENDS?|ADDITEMS"
    r"|TUPLE[123]?|DICT|LIST"
)


@dataclass(frozen=True, slots=True)
class Header:
    """What an archive says of itself before it is read.

    files, nbytes: of all between header and manifest. kv: whether KV is among it.
    """

    blendrag: str
    identity: KVIdentity
    dtype: str | None
    kv: bool
    files: int
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def encode(self) -> bytes:
        return json.dumps({"format": _FORMAT} | self.to_dict(), indent=1).encode()

    @classmethod
    def decode(cls, text: bytes) -> Header:
        """Raises ArchiveError for what is no header, or one of a later format."""
        try:
            values = json.loads(text)
            made_as = values.pop("format")
            if made_as != _FORMAT:
                raise ArchiveError(f"the archive has format {made_as!r}: this version reads {_FORMAT}")
            header = cls(**values | {"identity": KVIdentity(**values["identity"])})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ArchiveError(f"no export of an index ({type(error).__name__} in its header)") from error
        if not all(type(count) is int and count >= 0 for count in (header.files, header.nbytes)):
            raise ArchiveError("no export of an index (its header has no sizes)")
        return header


def belongs(name: str) -> bool:
    """Whether an index has a file of this name. Anything else is not even looked at."""
    return name in DATABASES or bool(_KV.fullmatch(name) or _VECTORS.fullmatch(name))


class _Hashed:
    """A file whose checksum, xxh3 with 128 bits, is known when it has been read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest = file, xxhash.xxh3_128()

    def read(self, size: int = -1, /) -> bytes:
        data = self._file.read(size)
        self._digest.update(data)
        return data

    def line(self, size: int, name: str) -> bytes:
        """Its line in the manifest."""
        return f"{self._digest.hexdigest()} {size} {name}\n".encode()


# -- export -----------------------------------------------------------------------------------------------


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
        records, size = _settle(folder / "catalogue.sqlite", index, kv)
        size += sum(path.stat().st_size for path in files.values())
        catalogue = index.catalogue
        header = Header(__version__, catalogue.identity, catalogue.dtype, kv, records + len(files), size)
        progress.note("exporting")
        progress.total(size)
        make_file(folder / "archive")
        with (folder / "archive").open("r+b") as archive, (folder / "manifest").open("x+b") as manifest:
            with tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT) as tar:
                manifest.write(_add(tar, HEADER, io.BytesIO(header.encode())))
                for member, path in (*files.items(), *(_records(index) if kv else ())):
                    with path.open("rb") as source:
                        manifest.write(_add(tar, member, source))
                        progress.advance(source.tell())
                _add(tar, MANIFEST, manifest)
            os.fsync(archive.fileno())
        os.link(folder / "archive", file)  # unlike a renaming, this overwrites nothing
    return header


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


def _settle(catalogue: Path, index: ClosedIndex, kv: bool) -> tuple[int, int]:
    """Make the copied catalogue say what the archive will hold, and nothing of this machine's deletions.
    Records and bytes of KV that it will hold."""
    count, size = 0, 0
    with sqlite.opened(catalogue) as db, sqlite.transaction(db):
        db.execute("DELETE FROM doomed")
        if not kv:
            db.execute("UPDATE records SET state = 'pending', bytes = 0 WHERE state = 'ready'")
            return count, size
        for shard, records in index.kv.shards():
            ready = index.catalogue.ready_from(shard)
            there = records.keys() & ready
            count += len(there)
            size += sum(records[key] for key in there)
            gone = [(key,) for key in ready - there]
            db.executemany("UPDATE records SET state = 'pending', bytes = 0 WHERE key = ?", gone)
    return count, size


def _records(index: ClosedIndex) -> Iterator[tuple[str, Path]]:
    for shard, records in index.kv.shards():
        for key in sorted(records.keys() & index.catalogue.ready_from(shard)):
            path = index.kv.path(key)
            yield path.relative_to(index.root).as_posix(), path


def _add(tar: tarfile.TarFile, name: str, file: IO[bytes]) -> bytes:
    """Append all of a file; its line in the manifest."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = file.seek(0, os.SEEK_END), 0o600
    file.seek(0)
    hashed = _Hashed(file)
    tar.addfile(info, hashed)
    tar.members.clear()  # type: ignore[attr-defined]  # it would remember each of a million records
    return hashed.line(info.size, name)


# -- import -----------------------------------------------------------------------------------------------


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
            try:
                with tarfile.open(fileobj=archive, mode="r:", tarinfo=_RegularFile) as tar:
                    header = _extract(tar, root, progress)
            except (tarfile.TarError, ValueError, OverflowError) as error:
                raise ArchiveError(
                    f"the archive is cut off, damaged, or no uncompressed tar file: {error}"
                ) from error
            progress.note("checking")
            _check(root, header)
            os.sync()
            root.rename(folder)
    return header


class _RegularFile(tarfile.TarInfo):
    """A member of an archive. Links, devices and headers that go on elsewhere are refused as soon as they are
    seen, before ``tarfile`` does what they say."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _RegularFile:
        info = super().frombuf(buf, encoding, errors)
        if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or info.size < 0:
            raise ArchiveError(f"the archive holds {info.name[:100]!r}, which is no regular file")
        return info


def _extract(tar: tarfile.TarFile, root: Path, progress: Progress) -> Header:
    """Write the archive's files, up to a manifest that names the same."""
    found = xxhash.xxh3_128()
    header = _header(tar, root, found)
    progress.note("importing")
    progress.total(header.nbytes)
    while (member := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # as in _add
        file = tar.extractfile(member)
        assert file is not None, "a regular file"
        if member.name == MANIFEST:
            manifest = xxhash.xxh3_128()
            while piece := file.read(_PIECE):
                manifest.update(piece)
            if manifest.digest() != found.digest():
                raise ArchiveError("the archive is damaged: its files are not those that were exported")
            return header
        if not belongs(member.name):
            raise ArchiveError(f"the archive holds {member.name[:100]!r}, which no index has")
        found.update(_write(root, member, file))
        progress.advance(member.size)
    raise ArchiveError("the archive is cut off: it has no list of its files")


def _header(tar: tarfile.TarFile, root: Path, found: xxhash.xxh3_128) -> Header:
    member = tar.next()
    if member is None or member.name != HEADER or member.size > _MOST_HEADER:
        raise ArchiveError("no export of an index: blendrag export makes them")
    file = tar.extractfile(member)
    assert file is not None, "a regular file"
    hashed = _Hashed(file)
    header = Header.decode(hashed.read(member.size))
    found.update(hashed.line(member.size, HEADER))
    free = shutil.disk_usage(root).free
    if header.nbytes > free:
        raise StoreFullError(
            f"the index takes {header.nbytes / 2**20:,.0f} MiB, and {str(root.parent.parent)!r} has"
            f" {free / 2**20:,.0f} MiB free"
        )
    return header


def _write(root: Path, member: tarfile.TarInfo, file: IO[bytes]) -> bytes:
    """Write a new file; its line in the manifest."""
    path, hashed = root / member.name, _Hashed(file)
    for above in reversed(path.parents):
        if above.is_relative_to(root):
            make_folder(above)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ArchiveError(f"the archive holds {path.name!r} twice") from None
    with os.fdopen(descriptor, "wb") as copy:
        shutil.copyfileobj(hashed, copy, _PIECE)
    return hashed.line(member.size, member.name)


def _check(root: Path, header: Header) -> None:
    """Raises ArchiveError if the files are not an index, or more than data."""
    for path in root.glob("chroma/*/*.pickle"):
        _refuse_code(path)
    for name in DATABASES:
        if (root / name).exists() and (problem := sqlite.suspicious(root / name)):
            raise ArchiveError(f"{name} in the archive {problem}")
    try:
        with contextlib.closing(Catalogue.open(root, None)) as catalogue:
            catalogue.totals()
            found = catalogue.identity, catalogue.dtype
    except StoreError as error:
        raise ArchiveError(f"the archive's catalogue cannot be used: {error}") from error
    if found != (header.identity, header.dtype):
        raise ArchiveError("the archive's header is not that of its catalogue")


def _refuse_code(path: Path) -> None:
    """Raises ArchiveError if a pickle, in which Chroma keeps its vectors' names, is more than plain data."""
    try:
        with path.open("rb") as file:
            for opcode, _, _ in pickletools.genops(file):
                if not _DATA_ONLY.fullmatch(opcode.name):
                    raise ArchiveError(f"{path.name} in the archive would run code ({opcode.name})")
    except ValueError as error:
        raise ArchiveError(f"{path.name} in the archive is damaged: {error}") from error
