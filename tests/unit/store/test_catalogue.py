from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import IDENTITY, start

from blendrag.errors import StoreError, StoreFullError, StoreMismatchError
from blendrag.store.catalogue import Catalogue


@pytest.fixture
def catalogue(tmp_path: Path) -> Iterator[Catalogue]:
    opened = Catalogue.open(tmp_path, IDENTITY)
    yield opened
    opened.close()


def rows(*keys: str) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(key, f"text of {key}", (1, 2, 3)) for key in keys]


# -- identity -------------------------------------------------------------------------------------------


def test_store_of_another_model_is_refused_by_name_and_difference(tmp_path: Path) -> None:
    Catalogue.open(tmp_path, IDENTITY).close()
    other = replace(IDENTITY, model="larger", weights="weights-2", num_layers=4)
    with pytest.raises(StoreMismatchError) as caught:
        Catalogue.open(tmp_path, other)
    message = str(caught.value)
    assert "'tiny'" in message and "'larger'" in message and str(tmp_path) in message
    assert "different: weights, num_layers)" in message
    Catalogue.open(tmp_path, IDENTITY).close()  # and nothing was changed


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "weights-2"},
        {"dtype": "float16"},
        {"num_layers": 3},
        {"num_kv_heads": 2},
        {"head_size": 8},
        {"codec": "other"},
        {"prefix": "0123"},
    ],
)
def test_nothing_kv_depends_on_is_left_out_of_the_identity(change: dict[str, object]) -> None:
    other = replace(IDENTITY, **change)  # type: ignore[arg-type]
    assert other.digest() != IDENTITY.digest()
    assert other.chunk_key([1, 2]) != IDENTITY.chunk_key([1, 2])
    assert IDENTITY.differences(other) == list(change)


def test_model_under_another_name_is_the_same_model(tmp_path: Path) -> None:
    Catalogue.open(tmp_path, IDENTITY).close()
    Catalogue.open(tmp_path, replace(IDENTITY, model="/elsewhere/tiny")).close()


@given(st.lists(st.integers(0, 2**31 - 1), max_size=5), st.lists(st.integers(0, 2**31 - 1), max_size=5))
def test_two_token_sequences_do_not_share_a_key(one: list[int], other: list[int]) -> None:
    assert (IDENTITY.chunk_key(one) == IDENTITY.chunk_key(other)) == (one == other)
    assert len(IDENTITY.chunk_key(one)) == 32


def test_store_of_another_version_is_an_error_of_ours(tmp_path: Path) -> None:
    catalogue = Catalogue.open(tmp_path, IDENTITY)
    catalogue.close()
    db = sqlite3.connect(tmp_path / "catalogue.sqlite")
    db.execute("""UPDATE meta SET value = '{"model": "tiny", "rope": "yarn"}'""")
    db.commit()
    db.close()
    with pytest.raises(StoreError, match="another version"):
        Catalogue.open(tmp_path, IDENTITY)


def test_file_that_is_no_catalogue_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "catalogue.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match=r"catalogue\.sqlite"):
        Catalogue.open(tmp_path, IDENTITY)


def test_root_that_is_a_file_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "index").write_text("")
    with pytest.raises(StoreError, match="index"):
        Catalogue.open(tmp_path / "index", IDENTITY)


def test_reading_a_closed_catalogue_is_an_error_of_ours(tmp_path: Path) -> None:
    catalogue = Catalogue.open(tmp_path, IDENTITY)
    catalogue.close()
    for read in (catalogue.owners, catalogue.entries, catalogue.known, catalogue.recent, catalogue.totals):
        with pytest.raises(StoreError):
            read()
    for look_up in (catalogue.ready, catalogue.entries_of):
        with pytest.raises(StoreError):
            look_up(["a"])
    with pytest.raises(StoreError):
        catalogue.knows("a")


# -- owners ---------------------------------------------------------------------------------------------

KEYS = st.sampled_from([f"k{n}" for n in range(6)])
OWNERS = st.sampled_from(["one", "two", "three"])
STEPS = st.one_of(
    st.tuples(st.just("register"), OWNERS, st.lists(KEYS, max_size=6)),
    st.tuples(st.just("release"), OWNERS, st.just([])),
    st.tuples(st.sampled_from(["ready", "evicted", "pending"]), st.just(""), st.lists(KEYS, max_size=3)),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(STEPS, max_size=20))
def test_chunk_is_kept_exactly_as_long_as_somebody_owns_it(steps: list[tuple[str, str, list[str]]]) -> None:
    owners: dict[str, set[str]] = {}
    states: dict[str, str] = {}
    with TemporaryDirectory() as folder:
        catalogue = Catalogue.open(Path(folder), IDENTITY)
        for action, owner, keys in steps:
            if action in ("register", "release"):
                before = owners.pop(owner, set())
                if keys:
                    owners[owner] = set(keys)
                owned = set().union(*owners.values())
                orphans = sorted(before - owned)
                for key in keys:
                    states[key] = "pending" if states.get(key) in (None, "evicted") else states[key]
                for key in orphans:
                    del states[key]
                called = (
                    catalogue.register(owner, rows(*keys))
                    if action == "register"
                    else catalogue.release(owner)
                )
                assert sorted(called) == orphans
            elif action == "ready":
                for key in keys:
                    assert catalogue.mark_ready(key, 10) == (key in states)
            else:
                catalogue.mark(keys, action)  # type: ignore[arg-type]
            if action not in ("register", "release"):
                states.update({key: action for key in keys if key in states})
            assert {owner: set(keys) for owner, keys in catalogue.owners().items()} == owners
            assert {entry.key: entry.state for entry in catalogue.entries()} == states
            ready = {key for key, state in states.items() if state == "ready"}
            assert catalogue.ready([*states, "unknown"]) == {key for key, _ in catalogue.recent()} == ready
            assert {entry.key for entry in catalogue.pending()} == {
                key for key, state in states.items() if state == "pending"
            }
            assert catalogue.known() == set(states)
            assert all(catalogue.knows(f"k{n}") == (f"k{n}" in states) for n in range(6))
            totals = catalogue.totals()
            assert (totals.chunks, totals.ready, totals.owners) == (len(states), len(ready), len(owners))
            assert (totals.bytes, totals.tokens) == (10 * len(ready), 3 * len(states))
        catalogue.close()


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])), st.lists(st.integers(0, 2**31 - 1), max_size=9))
def test_text_and_ids_come_back_as_they_were(text: str, ids: list[int]) -> None:
    with TemporaryDirectory() as folder:
        catalogue = Catalogue.open(Path(folder), IDENTITY)
        catalogue.register("doc", [("k", text, ids)])
        (entry,) = catalogue.entries_of(["k", "k", "unknown"])
        assert (entry.text, entry.token_ids) == (text, tuple(ids))
        catalogue.close()


def test_more_keys_than_a_statement_takes_are_all_found(catalogue: Catalogue) -> None:
    keys = [f"{n:032x}" for n in range(2_345)]
    catalogue.register("doc", rows(*keys))
    for key in keys[::2]:
        catalogue.mark_ready(key, 1)
    assert [entry.key for entry in catalogue.entries_of(reversed(keys))] == keys
    assert catalogue.ready(iter(keys)) == set(keys[::2])


def test_failed_registration_changes_nothing(catalogue: Catalogue) -> None:
    catalogue.register("doc", rows("a"))
    with pytest.raises(UnicodeEncodeError):
        catalogue.register("doc", [("b", "half a \ud800", (1,))])
    assert catalogue.owners() == {"doc": ["a"]}
    catalogue.register("doc", rows("b"))  # no transaction was left open
    assert catalogue.owners() == {"doc": ["b"]}


def test_failed_commit_does_not_block_what_follows(catalogue: Catalogue) -> None:
    with pytest.raises(StoreError), catalogue._file.transaction() as db:
        db.execute("PRAGMA defer_foreign_keys = ON")  # checked, and refused, by COMMIT only
        db.execute("INSERT INTO owners VALUES ('doc', 'no such chunk')")
    catalogue.register("doc", rows("a"))
    assert catalogue.owners() == {"doc": ["a"]}


def test_full_disk_under_the_catalogue_is_called_so_and_changes_nothing(catalogue: Catalogue) -> None:
    db = catalogue._file._connection
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite answers as on a full disk
    with pytest.raises(StoreFullError):
        catalogue.register("doc", [("a", "x" * 100_000, (1,))])
    db.execute("PRAGMA max_page_count = 100000")
    assert catalogue.known() == set()
    catalogue.register("doc", rows("a"))
    assert catalogue.owners() == {"doc": ["a"]}


def test_used_chunks_are_listed_last(catalogue: Catalogue) -> None:
    catalogue.register("doc", rows("a", "b", "c"))
    for key in "abc":
        catalogue.mark_ready(key, 1)
    catalogue.touch({"b": (2**62, 1), "a": (2**62 + 1, 1)})
    assert catalogue.recent() == [("c", 1), ("b", 1), ("a", 1)]


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
    process = start(CREATORS, tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors


def test_two_processes_on_one_catalogue_lose_nothing(tmp_path: Path) -> None:
    processes = [start(WRITER, tmp_path, name) for name in ("a", "b")]
    for process in processes:  # both create it at once
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    catalogue = Catalogue.open(tmp_path, IDENTITY)
    assert len(catalogue.owners()) == 200
    assert catalogue.known() == {f"{name}/{n}" for name in ("a", "b", "shared") for n in range(100)}
    assert catalogue.ready(catalogue.known()) == {f"shared/{n}" for n in range(100)}
    for n in range(100):
        assert catalogue.release(f"a/{n}") == [f"a/{n}"]  # b still has the shared one
    catalogue.close()
