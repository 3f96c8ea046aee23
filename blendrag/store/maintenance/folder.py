"""An index folder that this process alone has open, and the files of its KV."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blendrag.errors import StoreError
from blendrag.store.catalogue import Catalogue
from blendrag.store.lock import IndexLock
from blendrag.store.maintenance.disk import disk_errors
from blendrag.store.tiers.disk import LONGEST_WRITE_S, QUARANTINE, SUFFIX, TEMPORARY

_SHARD = re.compile(r"[0-9a-f]{2}")
_RECORD = re.compile(rf"([0-9a-f]{{32}}){re.escape(SUFFIX)}")


@dataclass(frozen=True, slots=True)
class RecordFolder:
    """The files of a disk tier. Every listing takes one folder's worth of memory, and raises StoreError.

    shared: it may have records of other indexes, and they may be writing now.
    """

    root: Path
    shared: bool = False

    def path(self, key: str) -> Path:
        return self.root / key[:2] / f"{key}{SUFFIX}"

    def shards(self) -> Iterator[tuple[str, dict[str, int]]]:
        """For all two first digits that a key can have: the size of each record's file, by key."""
        for number in range(256):
            name = f"{number:02x}"
            files = _files(self.root / name)
            yield name, {match[1]: file.st_size for at, file in files if (match := record_name(at, name))}

    def temporary(self) -> list[tuple[Path, int]]:
        """Files that were being written when a process died, with their sizes."""
        folder, latest = self.root / TEMPORARY, time.time() - LONGEST_WRITE_S
        files = [one for one in _files(folder) if not self.shared or one[1].st_mtime < latest]
        return [(folder / name, file.st_size) for name, file in files]

    def quarantined(self) -> list[tuple[Path, int]]:
        """Damaged records that were put aside, with their sizes."""
        folder = self.root / QUARANTINE
        return [(folder / name, file.st_size) for name, file in _files(folder)]

    def strangers(self) -> Iterator[Path]:
        """What lies among the KV and is not the store's."""
        with disk_errors(f"cannot read {str(self.root)!r}"), contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self.root):
                if entry.name in (TEMPORARY, QUARANTINE):
                    continue
                if not _SHARD.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
                    yield Path(entry.path)
                    continue
                for file in os.scandir(entry.path):
                    if not file.is_file(follow_symlinks=False) or not record_name(file.name, entry.name):
                        yield Path(file.path)


@dataclass(frozen=True, slots=True)
class ClosedIndex:
    """Made by :func:`closed_index`. kv: the KV in its own folder; tiers may have theirs elsewhere."""

    root: Path
    catalogue: Catalogue

    @property
    def kv(self) -> RecordFolder:
        return RecordFolder(self.root / "kv")


def remove(path: Path) -> None:
    """Raises StoreError."""
    with disk_errors(f"cannot remove {str(path)!r}"):
        path.unlink(missing_ok=True)


def record_name(file: str, shard: str) -> re.Match[str] | None:
    """The key in the first group, if a file in this folder is a record's."""
    return _RECORD.fullmatch(file) if file.startswith(shard) else None


@contextlib.contextmanager
def closed_index(folder: Path) -> Iterator[ClosedIndex]:
    """The index in ``folder``, of whatever model, locked meanwhile.

    Raises StoreError if there is none, StoreInUseError if a process has it open.
    """
    root = folder.expanduser().resolve()
    if not (root / "catalogue.sqlite").is_file():
        raise no_index(folder)
    lock = IndexLock(root)
    try:
        with contextlib.closing(Catalogue.open(root, None)) as catalogue:
            yield ClosedIndex(root, catalogue)
    finally:
        lock.release()


def no_index(folder: Path | str) -> StoreError:
    """The error for a folder that holds no index: with its neighbour's name, if it is nearly the same."""
    root = Path(folder).expanduser().resolve()
    siblings = [p.name for p in root.parent.iterdir() if p.is_dir()] if root.parent.is_dir() else []
    close = difflib.get_close_matches(root.name, siblings, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return StoreError(f"no index at {str(folder)!r}{hint}: ingest something first")


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
