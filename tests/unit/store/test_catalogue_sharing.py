"""One catalogue and several users or processes: who may read and write it, and that nothing is lost."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from blendrag.store.catalogue import Catalogue
from forked import Forked
from stores import IDENTITY, rows

# -- permissions ----------------------------------------------------------------------------------------


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def test_texts_can_be_read_by_nobody_else(tmp_path: Path) -> None:
    catalogue = Catalogue.open(tmp_path / "index", IDENTITY)
    catalogue.register("doc", rows("a"))
    assert stat.S_IMODE((tmp_path / "index").stat().st_mode) == 0o700
    made = modes(tmp_path / "index")
    assert len(made) > 1 and set(made.values()) == {0o600}  # the write-ahead log as well


def test_folder_that_others_were_let_into_stays_theirs(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir(mode=0o755)
    Catalogue.open(tmp_path / "index", IDENTITY).close()
    assert stat.S_IMODE((tmp_path / "index").stat().st_mode) == 0o755


READER = """
import os, sys
from pathlib import Path
from stores import IDENTITY
from blendrag.errors import StoreError
from blendrag.store.catalogue import Catalogue
if os.geteuid() == 0:  # who may write everywhere
    os.setgid(65534), os.setuid(65534)
try:
    Catalogue.open(Path(sys.argv[1]), IDENTITY)
except StoreError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("what", ["folder", "file", "both"])
def test_index_that_cannot_be_written_to_is_called_so(what: str) -> None:
    with TemporaryDirectory() as name:  # others cannot look into pytest's
        root = Path(name)
        Catalogue.open(root, IDENTITY).close()
        os.chmod(root / "catalogue.sqlite", 0o444 if what != "folder" else 0o666)
        os.chmod(root, 0o555 if what != "file" else 0o777)
        process = Forked(READER, root)
        _, errors = process.communicate(timeout=60)
        os.chmod(root, 0o700)
    assert process.returncode == 1
    assert errors.startswith(f"cannot write to the index folder {name!r}") and "Traceback" not in errors


# -- two processes --------------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from blendrag.store.catalogue import Catalogue
from blendrag.store.identity import KVIdentity
sys.stdin.readline()
identity = KVIdentity("tiny", "weights-1", "bfloat16", num_layers=2, num_kv_heads=1, head_size=4)
catalogue = Catalogue.open(Path(sys.argv[1]), identity)
for n in range(100):
    catalogue.register(f"{sys.argv[2]}/{n}", [(f"{sys.argv[2]}/{n}", "", (1,)), (f"shared/{n}", "", (1,))])
    catalogue.mark_ready(f"shared/{n}", 7)
    catalogue.entries()
catalogue.close()
"""


CREATORS = """
import sys
from multiprocessing import get_context
from pathlib import Path
from stores import IDENTITY
from blendrag.store.catalogue import Catalogue

def create(root, barrier):
    for n in range(30):
        barrier.wait(30)
        Catalogue.open(root / str(n), IDENTITY).close()

context = get_context("fork")
barrier = context.Barrier(4)
workers = [context.Process(target=create, args=(Path(sys.argv[1]), barrier)) for _ in range(4)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
sys.exit(any(worker.exitcode for worker in workers))
"""


def test_processes_that_create_the_catalogue_at_once_all_open_it(tmp_path: Path) -> None:
    Forked(CREATORS, tmp_path).finished(120)


def test_two_processes_on_one_catalogue_lose_nothing(tmp_path: Path) -> None:
    processes = [Forked(WRITER, tmp_path, name) for name in ("a", "b")]
    for process in processes:  # both create it at once
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.finished()
    catalogue = Catalogue.open(tmp_path, IDENTITY)
    assert len(catalogue.owners()) == 200
    assert catalogue.known() == {f"{name}/{n}" for name in ("a", "b", "shared") for n in range(100)}
    assert catalogue.ready(catalogue.known()) == {f"shared/{n}" for n in range(100)}
    for n in range(100):
        assert catalogue.release(f"a/{n}") == [f"a/{n}"]  # b still has the shared one


OTHER = """
import sys
from pathlib import Path
from blendrag.store.catalogue import Catalogue
Catalogue.open(Path(sys.argv[1]), None).close()
"""


def test_second_connection_of_a_process_keeps_the_locks_of_the_first(tmp_path: Path) -> None:
    """Else another process that closes its own takes the file for unused, and deletes its log."""
    Catalogue.open(tmp_path, IDENTITY)
    Catalogue.open(tmp_path, IDENTITY).close()
    subprocess.run([sys.executable, "-c", OTHER, str(tmp_path)], check=True)
    assert (tmp_path / "catalogue.sqlite-wal").exists()
