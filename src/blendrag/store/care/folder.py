"""An index folder that this process alone has open, and the files of its KV."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blendrag.errors import StoreError
from blendrag.store.catalogue import Catalogue
from blendrag.store.lock import IndexLock
from blendrag.store.tiers.disk import QUARANTINE, SUFFIX, TEMPORARY

_SHARD = re.compile(r"[0-9a-f]{2}")
_RECORD = re.compile(rf"([0-9a-f]{{32}}){re.escape(SUFFIX)}")


@dataclass(frozen=True, slots=True)
class ClosedIndex:
    """Made by :func:`closed_index`. Every listing takes one folder's worth of memory."""

    root: Path
    catalogue: Catalogue

    @property
    def kv(self) -> Path:
        return self.root / "kv"

    def path(self, key: str) -> Path:
        return self.kv / key[:2] / f"{key}{SUFFIX}"

    def shards(self) -> Iterator[tuple[str, dict[str, int]]]:
        """For all two first digits that a key can have: the size of each record's file, by key."""
        for number in range(256):
            name = f"{number:02x}"
            files = _files(self.kv / name)
            yield name, {match[1]: size for file, size in files if (match := record_name(file, name))}

    def temporary(self) -> list[tuple[Path, int]]:
        """Files that were being written when a process died."""
        return [(self.kv / TEMPORARY / file, size) for file, size in _files(self.kv / TEMPORARY)]

    def quarantined(self) -> list[tuple[Path, int]]:
        """Damaged records that were put aside."""
        return [(self.kv / QUARANTINE / file, size) for file, size in _files(self.kv / QUARANTINE)]

    def strangers(self) -> Iterator[Path]:
        """What lies among the KV and is not the store's."""
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self.kv):
                if entry.name in (TEMPORARY, QUARANTINE):
                    continue
                if not _SHARD.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
                    yield Path(entry.path)
                    continue
                for file in os.scandir(entry.path):
                    if not file.is_file(follow_symlinks=False) or not record_name(file.name, entry.name):
                        yield Path(file.path)


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


def _files(folder: Path) -> list[tuple[str, int]]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        return [
            (entry.name, entry.stat(follow_symlinks=False).st_size)
            for entry in entries
            if entry.is_file(follow_symlinks=False)
        ]
    return []
