"""One process per index."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from filelock import FileLock, Timeout

from blendrag.errors import StoreError, StoreInUseError
from blendrag.private import make_file, make_folder


class IndexLock:
    """Held while an index is open. The system drops it when the process ends, however it ends."""

    def __init__(self, root: Path) -> None:
        self._lock = FileLock(root / "lock", mode=0o600, thread_local=False)  # any thread may close an index
        self._holder = root / "lock.pid"
        try:
            make_folder(root)
            self._lock.acquire(timeout=0)
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
