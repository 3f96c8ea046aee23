"""The lock that keeps an index to one program, and a lock among that program's processes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from filelock import FileLock, Timeout

from blendrag.errors import StoreError, StoreInUseError
from blendrag.files.private import make_file, make_folder

_LOOK_S = 0.05


class IndexLock:
    """The lock on an index, held while the index is open by the process that writes its KV, or by its client.
    The system drops it when that process ends, however it ends."""

    def __init__(self, root: Path, wait_s: float = 0.0, client: int = 0) -> None:
        """Take the lock. ``wait_s``: how long to wait for a holder that is about to end, unless its client
        runs.
        ``client``: the id of the process that this one ends with; 0: it ends by itself."""
        self._lock = FileLock(root / "lock", mode=0o600, thread_local=False)  # any thread may close an index
        self._holder = root / "lock.pid"
        try:
            make_folder(root)
            self._acquire(time.monotonic() + wait_s)
            make_file(self._holder)
            self._holder.write_text(f"{os.getpid()} {client}" if client else str(os.getpid()))
        except Timeout:
            holder = next((f"process {pid}" for pid in self._pids()), "another process")
            raise StoreInUseError(
                f"the index {str(root)!r} is open in {holder}: close it there first"
            ) from None
        except OSError as error:
            self._lock.release()
            raise StoreError(
                f"cannot use {str(root)!r} as an index: {error.strerror}: name another folder (--index,"
                " kv_dir, or cache_dir if none is named)"
            ) from error

    def _acquire(self, deadline: float) -> None:
        while True:
            with contextlib.suppress(Timeout):
                self._lock.acquire(timeout=0)
                return
            if time.monotonic() > deadline or any(psutil.pid_exists(client) for client in self._pids()[1:]):
                raise Timeout(self._lock.lock_file)
            time.sleep(_LOOK_S)

    def _pids(self) -> list[int]:
        """Return the ids of the holder and its client, as far as they are known."""
        with contextlib.suppress(OSError, ValueError):  # the holder writes it just after it has the lock
            return [int(pid) for pid in self._holder.read_text().split()]
        return []

    def release(self) -> None:
        """Let go of the lock. Safe to call twice: the next holder's id stays."""
        if self._lock.is_locked:
            with contextlib.suppress(OSError):
                self._holder.unlink(missing_ok=True)
            self._lock.release()


class Turns:
    """A lock among threads, and among the processes that have an index open together if it has a ``path``.
    A thread may take it several times."""

    def __init__(self, path: Path | None) -> None:
        self._threads = threading.RLock()
        self._processes = None if path is None else FileLock(path, mode=0o600, thread_local=False)

    @property
    def free(self) -> bool:
        """Return whether nobody else holds the lock, in this process or another."""
        if not self._threads.acquire(blocking=False):
            return False
        try:
            with self._processes.acquire(timeout=0) if self._processes else contextlib.nullcontext():
                return True
        except OSError:  # a Timeout, too
            return False
        finally:
            self._threads.release()

    @contextlib.contextmanager
    def mine(self) -> Iterator[None]:
        """Wait for the lock, and hold it inside."""
        with self._threads, self._processes or contextlib.nullcontext():
            yield
