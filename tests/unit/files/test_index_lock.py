from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from blendrag.errors import StoreError, StoreInUseError
from blendrag.files.lock import IndexLock, Turns
from forked import Forked

HOLDER = """
import sys
from pathlib import Path
from blendrag.files.lock import IndexLock
lock = IndexLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
lock.release()
"""


def holding(script: str, folder: Path) -> Forked:
    process = Forked(script, folder)
    assert process.stdout.readline() == "held\n"
    return process


def test_index_open_elsewhere_is_refused_with_the_process_named(tmp_path: Path) -> None:
    process = holding(HOLDER, tmp_path)
    with pytest.raises(StoreInUseError, match=rf"process {process.pid}\b") as caught:
        IndexLock(tmp_path)
    assert str(tmp_path) in str(caught.value)
    process.finished()
    IndexLock(tmp_path).release()


def test_killed_process_does_not_leave_the_index_locked(tmp_path: Path) -> None:
    process = holding(HOLDER, tmp_path)
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


def test_lock_that_is_let_go_twice_leaves_the_next_holders_name(tmp_path: Path) -> None:
    first = IndexLock(tmp_path)
    first.release()
    second = IndexLock(tmp_path)
    first.release()
    with pytest.raises(StoreInUseError, match=rf"process {os.getpid()}\b"):
        IndexLock(tmp_path)
    second.release()


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


def test_process_that_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    process = holding(HOLDER, tmp_path)
    threading.Timer(0.3, process.kill).start()
    IndexLock(tmp_path, 30).release()
    process.communicate(timeout=30)


def test_process_whose_client_goes_on_is_not_waited_for(tmp_path: Path) -> None:
    client = Forked("input()", tmp_path)
    lock = IndexLock(tmp_path, client=client.pid)
    begun = time.monotonic()
    with pytest.raises(StoreInUseError, match=rf"process {os.getpid()}:"):
        IndexLock(tmp_path, 600)
    assert time.monotonic() - begun < 60
    client.kill()
    client.communicate(timeout=30)
    threading.Timer(0.3, lock.release).start()
    IndexLock(tmp_path, 600).release()


COUNTER = """
import sys
from pathlib import Path
from blendrag.files.lock import Turns
file, turns = Path(sys.argv[1]) / "count", Turns(Path(sys.argv[1]) / "turns")
for _ in range(50):
    with turns.mine(), turns.mine():
        count = int(file.read_text())
        file.write_text(str(count + 1))
"""


def test_two_processes_are_in_turn_one_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("0")
    processes = [Forked(COUNTER, tmp_path) for _ in range(3)]
    for process in processes:
        process.finished()
    assert (tmp_path / "count").read_text() == "150"


TURN = """
import sys
from pathlib import Path
from blendrag.files.lock import Turns
with Turns(Path(sys.argv[1]) / "turns").mine():
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_turn_of_another_process_is_not_free(tmp_path: Path) -> None:
    turns = Turns(tmp_path / "turns")
    process = holding(TURN, tmp_path)
    assert not turns.free
    process.finished()
    assert turns.free
    with turns.mine():
        assert turns.free  # to its own thread


def test_two_threads_are_in_turn_one_at_a_time(tmp_path: Path) -> None:
    for turns in (Turns(tmp_path / "turns"), Turns(None)):
        inside = list[int]()

        def count(turns: Turns = turns, inside: list[int] = inside) -> None:
            for _ in range(50):
                with turns.mine():
                    number = len(inside)
                    time.sleep(1e-4)
                    inside.append(number)

        threads = [threading.Thread(target=count) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert inside == list(range(150))
