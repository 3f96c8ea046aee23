from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from blendrag.errors import StoreError, StoreInUseError
from blendrag.store.lock import IndexLock
from forked import Forked

HOLDER = """
import sys
from pathlib import Path
from blendrag.store.lock import IndexLock
lock = IndexLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
lock.release()
"""


def test_index_open_elsewhere_is_refused_with_the_process_named(tmp_path: Path) -> None:
    process = Forked(HOLDER, tmp_path)
    assert process.stdout and process.stdout.readline() == "held\n"
    with pytest.raises(StoreInUseError, match=rf"process {process.pid}\b") as caught:
        IndexLock(tmp_path)
    assert str(tmp_path) in str(caught.value)
    process.communicate(timeout=30)
    assert process.returncode == 0
    IndexLock(tmp_path).release()


def test_killed_process_does_not_leave_the_index_locked(tmp_path: Path) -> None:
    process = Forked(HOLDER, tmp_path)
    assert process.stdout and process.stdout.readline() == "held\n"
    process.kill()
    process.communicate(timeout=30)
    lock = IndexLock(tmp_path)
    with pytest.raises(StoreInUseError, match=rf"process {os.getpid()}\b"):  # not the dead one
        IndexLock(tmp_path)
    lock.release()


def test_index_closed_in_another_thread_is_unlocked(tmp_path: Path) -> None:
    lock = IndexLock(tmp_path)
    thread = threading.Thread(target=lock.release)
    thread.start()
    thread.join()
    IndexLock(tmp_path).release()


def test_lock_whose_holder_is_unknown_is_refused_all_the_same(tmp_path: Path) -> None:
    lock = IndexLock(tmp_path)
    for text in (None, ""):
        (tmp_path / "lock.pid").unlink() if text is None else (tmp_path / "lock.pid").write_text(text)
        with pytest.raises(StoreInUseError, match="another process"):
            IndexLock(tmp_path)
    lock.release()


def test_folder_that_cannot_be_used_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        IndexLock(tmp_path / "file")


def test_lock_that_could_not_be_signed_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "lock.pid").mkdir()
    with pytest.raises(StoreError) as caught:
        IndexLock(tmp_path)
    (tmp_path / "lock.pid").rmdir()
    IndexLock(tmp_path).release()
    del caught  # held until here: the lock was not let go by garbage collection
