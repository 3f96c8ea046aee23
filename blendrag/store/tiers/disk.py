"""The disk tier: one file per record, written atomically, read a layer at a time into where it is used."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from blendrag.errors import StoreError, StoreFullError
from blendrag.files.private import write_whole
from blendrag.store.record import HEAD_READ, DamagedError, Layout, Record
from blendrag.store.stack import TierSpec
from blendrag.store.tiers.interface import Context, Found, Opened, Read, Tier, TierError, register_tier
from blendrag.store.tiers.local import LocalTier

SUFFIX = ".safetensors"
TEMPORARY = "tmp"  # folder of files that are being written
QUARANTINE = "quarantine"  # folder of damaged records, kept to be looked at
_MAX_QUARANTINED = 16
LONGEST_WRITE_S = 3600.0
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@register_tier("disk")
class DiskTier(LocalTier):
    """A tier of files in ``root``, sharded by the first two digits of the key, mode 0600 in folders of mode
    0700.

    Rows are read by position into the caller's buffer, so there is no second copy; a mapped file would save
    none, and kill the process if somebody cut it off.
    ``found`` knows what is there, least recently used first; without it, the folder is searched.
    """

    def __init__(
        self,
        spec: TierSpec,
        layout: Layout,
        root: Path,
        found: Found | None = None,
        on_evict: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(spec, layout, on_evict)
        self._root, self._known = root, found
        try:
            for folder in (root, root / TEMPORARY):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            if spec.writes == "never" and root.is_dir():
                return
            raise StoreError(f"cannot open the KV store {str(root)!r}: {error.strerror}") from error

    @classmethod
    def make(cls, spec: TierSpec, layout: Layout, context: Context) -> Tier:
        if spec.path is None:
            return cls(spec, layout, context.folder, context.found, context.on_evict)
        return cls(spec, layout, spec.path.expanduser() / layout.digest, None, context.on_evict)

    def path(self, key: str) -> Path:
        """Return the path that a record's file has, or would have."""
        return self._root / key[:2] / f"{key}{SUFFIX}"

    def sweep(self) -> None:
        """Remove what a crash left half-written. In a folder that others may write to, remove only what is
        older than any write takes."""
        shared = self.spec.path is not None
        with contextlib.suppress(OSError):
            for file in os.scandir(self._root / TEMPORARY):
                if not shared or file.stat().st_mtime < time.time() - LONGEST_WRITE_S:
                    os.unlink(file.path)

    # -- reading ------------------------------------------------------------------------------------------

    def _open(self, keys: Sequence[str]) -> Mapping[str, Opened | Exception]:
        found: dict[str, Opened | Exception] = {}
        for key in keys:
            try:
                found[key] = self._open_one(key)
            except FileNotFoundError:
                continue
            except OSError as error:
                found[key] = _trouble(key, error)
            except DamagedError as error:
                found[key] = error
        return found

    def _open_one(self, key: str) -> Opened:
        descriptor = os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            size, wanted = os.fstat(descriptor).st_size, HEAD_READ
            while isinstance(head := self.layout.parse(key, os.pread(descriptor, wanted, 0), size), int):
                wanted = head
        except BaseException:
            os.close(descriptor)
            raise
        return Opened(self, head, _File(descriptor))

    def _rows(self, one: Read) -> torch.Tensor:
        head, file = one.opened.head, one.opened.source
        assert isinstance(file, _File)
        buffer = one.into.view(-1).numpy().data
        at = head.begin + one.first * head.row_bytes
        while buffer:
            try:
                got = os.preadv(file.descriptor, [buffer], at)
            except OSError as error:
                raise _trouble(head.key, error) from error
            if not got:
                raise DamagedError(f"{head.key}: cut off")
            buffer, at = buffer[got:], at + got
        return one.into

    def close_record(self, opened: Opened) -> None:
        assert isinstance(opened.source, _File)
        opened.source.close()

    def has(self, keys: Iterable[str]) -> set[str]:
        try:
            return {key for key in keys if self.path(key).exists()}
        except OSError as error:
            raise TierError(f"{self.name}: {error.strerror}") from error

    # -- writing ------------------------------------------------------------------------------------------

    def _write(self, record: Record) -> None:
        path, rows = self.path(record.key), record.rows.view(-1).numpy().data
        try:
            if not path.parent.is_dir():
                path.parent.mkdir(mode=0o700, exist_ok=True)
            write_whole(path, record.head.bytes(), rows, beside=self._root / TEMPORARY)
            _sync_folder(path.parent)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise StoreFullError(
                    f"no room for a chunk of {record.head.nbytes:,} bytes in {str(self._root)!r}: free disk"
                    " space and ingest again, what is stored stays"
                ) from error
            raise StoreError(f"cannot write to {str(self._root)!r}: {error.strerror}") from error

    def delete(self, keys: Iterable[str]) -> int:
        keys = list(keys)
        with contextlib.suppress(OSError):
            for key in keys:  # damaged, but still made of the same text
                (self._root / QUARANTINE / self.path(key).name).unlink(missing_ok=True)
        return super().delete(keys)

    def _check_removable(self, key: str) -> None:
        folder = self.path(key).parent
        if folder.exists() and not os.access(folder, os.W_OK):
            raise StoreError(f"cannot write to {str(self._root)!r}: it is read-only now")

    def _remove(self, key: str) -> bool:
        try:
            self.path(key).unlink()
        except OSError:
            return False  # gone, or read-only meanwhile: the next opening tries again
        return True

    def quarantine(self, key: str) -> None:
        """Put a damaged record aside, where it can be looked at; only the latest few are kept."""
        folder = self._root / QUARANTINE
        with self._writing:
            self._forget(key)
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                kept = sorted(os.scandir(folder), key=lambda file: file.stat().st_ctime_ns)
                for file in kept[: max(0, len(kept) + 1 - _MAX_QUARANTINED)]:
                    os.unlink(file.path)
                os.replace(self.path(key), folder / self.path(key).name)
            except OSError:
                self._remove(key)
        self.count(damaged=1)

    def _found(self) -> Iterable[tuple[str, int]]:
        return self._known() if self._known else self._search()

    def _search(self) -> Iterator[tuple[str, int]]:
        files: list[tuple[int, str, int]] = []
        for shard in os.scandir(self._root):
            if not shard.is_dir() or len(shard.name) != 2:
                continue
            for file in os.scandir(shard.path):
                with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                    if file.name.endswith(SUFFIX):
                        there = file.stat()
                        files.append((there.st_mtime_ns, file.name.removesuffix(SUFFIX), there.st_size))
        return ((key, size) for _, key, size in sorted(files))


class _File:
    """A descriptor that is closed once, whichever threads ask for it."""

    def __init__(self, descriptor: int) -> None:
        self._open = [descriptor]

    @property
    def descriptor(self) -> int:
        return self._open[0] if self._open else -1

    def close(self) -> None:
        with contextlib.suppress(IndexError):
            os.close(self._open.pop())

    __del__ = close  # of records that an error has left open


def _trouble(key: str, error: OSError) -> Exception:
    if error.errno == errno.EIO:
        return DamagedError(f"{key}: {error.strerror}")
    return TierError(f"{key}: {error.strerror}")  # too many open files, perhaps: no reason to drop the record


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
