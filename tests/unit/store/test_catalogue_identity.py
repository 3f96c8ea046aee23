"""Whose a catalogue is: another model's or version's is refused; users and processes that share one."""

from __future__ import annotations

import os
import re
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.errors import StoreError, StoreMismatchError
from blendrag.store.catalogue import Catalogue
from blendrag.store.identity import prefix_name
from forked import Forked
from stores import IDENTITY, rows

ONE, OTHER = ({"prefix": prefix_name("system", ids)} for ids in ([1, 2], [1, 3]))


@pytest.mark.parametrize(
    ("made", "opened", "told"),
    [
        (
            {},
            {"model": "larger", "weights": "weights-2", "num_layers": 4},
            r"model 'tiny', not 'larger' \(different: weights, num_layers\): open it with that model",
        ),
        ({}, {"codec": "int8"}, "codec='raw', not codec='int8': open it with that, or"),
        ({}, ONE, "shared_prefix='none', not shared_prefix='system': open"),
        (ONE, {}, "shared_prefix='system', not shared_prefix='none': open"),
        (ONE, OTHER, "another shared prefix"),
    ],
)
def test_store_of_another_identity_is_refused_by_name_and_difference(
    tmp_path: Path, made: dict[str, Any], opened: dict[str, Any], told: str
) -> None:
    """Where a setting differs, that is told, and it is not called another model."""
    Catalogue.open(tmp_path, replace(IDENTITY, **made)).close()
    with pytest.raises(StoreMismatchError, match=f"{re.escape(repr(str(tmp_path)))} was made with {told}"):
        Catalogue.open(tmp_path, replace(IDENTITY, **opened))
    Catalogue.open(tmp_path, replace(IDENTITY, **made)).close()  # and nothing was changed


@pytest.mark.parametrize(
    "name", ["weights", "dtype", "num_layers", "num_kv_heads", "head_size", "codec", "prefix"]
)
def test_nothing_kv_depends_on_is_left_out_of_the_identity(name: str) -> None:
    other = replace(IDENTITY, **{name: "other"})  # type: ignore[arg-type]
    assert other.digest() != IDENTITY.digest()
    assert other.chunk_key([1, 2]) != IDENTITY.chunk_key([1, 2])
    assert IDENTITY.differences(other) == [name]


def test_model_under_another_name_is_the_same_model(tmp_path: Path) -> None:
    Catalogue.open(tmp_path, IDENTITY).close()
    Catalogue.open(tmp_path, replace(IDENTITY, model="/elsewhere/tiny")).close()


@given(st.lists(st.integers(0, 2**31 - 1), max_size=5), st.lists(st.integers(0, 2**31 - 1), max_size=5))
def test_two_token_sequences_do_not_share_a_key(one: list[int], other: list[int]) -> None:
    assert (IDENTITY.chunk_key(one) == IDENTITY.chunk_key(other)) == (one == other)
    assert len(IDENTITY.chunk_key(one)) == 32


def test_older_catalogue_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "catalogue.sqlite")
    db.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
    db.execute("INSERT INTO meta VALUES ('identity', '{}')")
    db.commit()
    with pytest.raises(StoreMismatchError, match="another version"):
        Catalogue.open(tmp_path, IDENTITY)
    assert db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall() == [("meta",)]
    db.close()


@pytest.mark.parametrize(
    "value",
    ["json_remove(value, '$.layout')", """'{"model": "tiny", "rope": "yarn"}'"""],
    ids=["less", "other"],
)
def test_identity_of_another_version_is_refused(tmp_path: Path, value: str) -> None:
    Catalogue.open(tmp_path, IDENTITY).close()
    db = sqlite3.connect(tmp_path / "catalogue.sqlite")
    db.execute(f"UPDATE meta SET value = {value}")
    db.commit()
    db.close()
    with pytest.raises(StoreMismatchError, match="another version"):
        Catalogue.open(tmp_path, IDENTITY)


def test_file_that_is_no_catalogue_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "catalogue.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match=r"catalogue\.sqlite"):
        Catalogue.open(tmp_path, IDENTITY)


def test_reading_a_closed_catalogue_is_an_error_of_ours(tmp_path: Path) -> None:
    catalogue = Catalogue.open(tmp_path, IDENTITY)
    catalogue.close()
    with pytest.raises(StoreError, match="the catalogue failed"):
        catalogue.owners()


def test_engine_of_another_dtype_is_refused_naming_both(tmp_path: Path) -> None:
    catalogue = Catalogue.open(tmp_path, IDENTITY)
    assert catalogue.dtype is None
    catalogue.settle_dtype("bfloat16")
    catalogue.settle_dtype("bfloat16")
    catalogue.close()
    catalogue = Catalogue.open(tmp_path, IDENTITY)
    with pytest.raises(StoreMismatchError, match=r"in bfloat16, not float32"):
        catalogue.settle_dtype("float32")
    assert catalogue.dtype == "bfloat16"


def test_no_prefix_has_the_name_of_another() -> None:
    names = [prefix_name("system", ids) for ids in ([], [1], [2], [1, 2], [2, 1])]
    assert len(set(names)) == len(names)
    assert names[0] == IDENTITY.prefix


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
from stores import IDENTITY
sys.stdin.readline()
catalogue = Catalogue.open(Path(sys.argv[1]), IDENTITY)
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
    Forked(OTHER, tmp_path).finished()
    assert (tmp_path / "catalogue.sqlite-wal").exists()
