"""An index that only this process has open: the files of its KV, and the tiers elsewhere that have more."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blendrag.errors import StoreError, StoreFullError
from blendrag.files.lock import IndexLock
from blendrag.files.sqlite import opened
from blendrag.store.catalogue import Catalogue
from blendrag.store.kv_reader import close_all
from blendrag.store.record import Layout
from blendrag.store.stack import TierSpec, primary_at
from blendrag.store.tiers import Context, Tier, make_tier
from blendrag.store.tiers.disk import LONGEST_WRITE_S, NO_ROOM, QUARANTINE, SUFFIX, TEMPORARY

DATABASES = ("catalogue.sqlite", "ledger.sqlite", "chroma/chroma.sqlite3")  # an index has these

SHARDS = [f"{number:02x}" for number in range(256)]  # the first two digits of keys
_RECORD = re.compile(rf"([0-9a-f]{{32}}){re.escape(SUFFIX)}")


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Raise StoreFullError or StoreError, "what: reason", for an OSError inside."""
    try:
        yield
    except OSError as error:
        kind = StoreFullError if error.errno in NO_ROOM else StoreError
        raise kind(f"{what}: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class RecordFolder:
    """The files of a disk tier. Every listing takes one folder's worth of memory, and raises StoreError.

    shared: it may have records of other indexes, and they may be writing now.
    """

    root: Path
    shared: bool = False

    def path(self, key: str) -> Path:
        return self.root / key[:2] / f"{key}{SUFFIX}"

    def records(self, shard: str) -> dict[str, int]:
        """Return the size of each record's file in a shard, by key."""
        files = _files(self.root / shard)
        return {match[1]: file.st_size for name, file in files if (match := record_name(name, shard))}

    def temporary(self) -> list[tuple[Path, int]]:
        """Return the files that were being written when a process died, with their sizes."""
        folder, latest = self.root / TEMPORARY, time.time() - LONGEST_WRITE_S
        files = [one for one in _files(folder) if not self.shared or one[1].st_mtime < latest]
        return [(folder / name, file.st_size) for name, file in files]

    def quarantined(self) -> list[tuple[Path, int]]:
        """Return damaged records that were put aside, with their sizes."""
        folder = self.root / QUARANTINE
        return [(folder / name, file.st_size) for name, file in _files(folder)]

    def strangers(self) -> Iterator[Path]:
        """Yield what lies among the KV and is not the store's."""
        with disk_errors(f"cannot read {str(self.root)!r}"), contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self.root):
                if entry.name in (TEMPORARY, QUARANTINE):
                    continue
                if entry.name not in SHARDS or not entry.is_dir(follow_symlinks=False):
                    yield Path(entry.path)
                    continue
                for file in os.scandir(entry.path):
                    if not file.is_file(follow_symlinks=False) or not record_name(file.name, entry.name):
                        yield Path(file.path)


@dataclass(frozen=True, slots=True)
class ClosedIndex:
    """An index that :func:`closed_index` has opened. kv: in its own folder."""

    root: Path
    catalogue: Catalogue

    @property
    def kv(self) -> RecordFolder:
        return RecordFolder(self.root / "kv")


def remove(path: Path) -> None:
    """Remove a file. Raises StoreError."""
    with disk_errors(f"cannot remove {str(path)!r}"):
        path.unlink(missing_ok=True)


def record_name(file: str, shard: str) -> re.Match[str] | None:
    """Return a match with the key as its first group, if a file in this folder is a record's."""
    return _RECORD.fullmatch(file) if file.startswith(shard) else None


@contextlib.contextmanager
def closed_index(folder: Path) -> Iterator[ClosedIndex]:
    """Open the index in ``folder``, of whatever model, and hold its lock inside.

    Raises StoreError if there is none, StoreInUseError if a process has it open.
    """
    root = folder.expanduser().resolve()
    if not Catalogue.is_in(root):
        raise no_index(folder)
    lock = IndexLock(root)
    try:
        with contextlib.closing(Catalogue.open(root, None)) as catalogue:
            yield ClosedIndex(root, catalogue)
    finally:
        lock.release()


def record_folders(index: ClosedIndex, stack: Sequence[TierSpec]) -> list[RecordFolder]:
    """Return the index's own folder, if the stack has it, and that of a primary tier elsewhere, if some
    engine has written to the index.

    Raises ConfigError for a stack without a primary tier.
    """
    primary = stack[primary_at(stack)]
    folders = [index.kv] if any((spec.kind, spec.path) == ("disk", None) for spec in stack) else []
    if primary.path is not None and (layout := layout_of(index.catalogue)):
        folders.append(RecordFolder(primary.path.expanduser() / layout.digest, shared=True))
    return folders


def layout_of(catalogue: Catalogue) -> Layout | None:
    """Return the layout of an index's records; None if no engine has written any yet."""
    return None if catalogue.dtype is None else Layout(catalogue.identity, catalogue.dtype)


@contextlib.contextmanager
def other_tiers(catalogue: Catalogue, stack: Sequence[TierSpec]) -> Iterator[list[Tier]]:
    """Open the stack's other folders and servers; none if no engine has written to the index yet.

    Raises ConfigError for a tier that cannot be used as it is described.
    """
    elsewhere = [spec for spec in stack if spec.elsewhere]
    tiers: list[Tier] = []
    try:
        if elsewhere and (layout := layout_of(catalogue)):
            for spec in elsewhere:
                tiers.append(make_tier(spec, layout, Context(Path())))
        yield tiers
    finally:
        close_all(tiers)


def not_mounted(spec: TierSpec) -> bool:
    """Return whether a tier's folder is not there now, so that nobody knows what is in it."""
    return spec.path is not None and not spec.path.expanduser().is_dir()


def no_index(folder: Path | str) -> StoreError:
    """Return the error for a folder that holds no KV, with the name of a similar neighbour."""
    root = Path(folder).expanduser().resolve()
    # By their fingerprints: an index of ours that has lost its catalogue has a ledger, too.
    if number_in(root / "ledger.sqlite", "SELECT COUNT(*) FROM documents WHERE fingerprint LIKE 'served %'"):
        return StoreError(
            f"the KV of index {str(folder)!r} is a server's: ask with --server, and look after the KV there"
            " (/v1/kb); to delete a document, ingest again without it"
        )
    siblings = [neighbour.name for neighbour in root.parent.glob("*/") if neighbour != root]
    close = difflib.get_close_matches(root.name, siblings, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return StoreError(f"no index at {str(folder)!r}{hint}: ingest something first")


def number_in(database: Path, query: str) -> int:
    """Return the number that a query gives; 0 if the file is not there, or not what it should be."""
    with contextlib.suppress(StoreError):
        if database.is_file():
            with opened(database) as db:
                return int(db.execute(query).fetchone()[0] or 0)
    return 0


def _files(folder: Path) -> list[tuple[str, os.stat_result]]:
    with (
        disk_errors(f"cannot read {str(folder)!r}"),
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
        os.scandir(folder) as entries,
    ):
        return [
            (entry.name, entry.stat(follow_symlinks=False))
            for entry in entries
            if entry.is_file(follow_symlinks=False)
        ]
    return []
