"""One program per index; and turns among the processes of one."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from blendrag.errors import StoreError, StoreInUseError
from blendrag.private import make_file, make_folder


class IndexLock:
    """Held while an index is open, by the process that writes its KV, or its client. The system
    drops it when that process ends, however it ends."""

    def __init__(self, root: Path, wait_s: float = 0.0) -> None:
        """``wait_s``: so long for one who is about to end."""
        self._lock = FileLock(root / "lock", mode=0o600, thread_local=False)  # any thread may close an index
        self._holder = root / "lock.pid"
        try:
            make_folder(root)
            self._lock.acquire(timeout=wait_s)
            make_file(self._holder)
            self._holder.write_text(str(os.getpid()))
        except Timeout:
            raise StoreInUseError(f"the index {str(root)!r} is open in {self._describe()}") from None
        except OSError as error:
            self._lock.release()
            raise StoreError(f"cannot use {str(root)!r} as an index: {error.strerror}") from error

    def _describe(self) -> str:
        pid = ""
        with contextlib.suppress(OSError):  # the holder writes it just after it has the lock
            pid = self._holder.read_text().strip()
        return f"{f'process {pid}' if pid else 'another process'}: close it there first"

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self._holder.unlink(missing_ok=True)
        self._lock.release()


class Turns:
    """A lock among threads, and among the processes that have an index open together if it has a ``path``.
    A thread may take it several times."""

    def __init__(self, path: Path | None) -> None:
        self._threads = threading.RLock()
        self._processes = None if path is None else FileLock(path, mode=0o600, thread_local=False)

    @contextlib.contextmanager
    def mine(self) -> Iterator[None]:
        """Waits for it."""
        with self._threads, self._processes or contextlib.nullcontext():
            yield
