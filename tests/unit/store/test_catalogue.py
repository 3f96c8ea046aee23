from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from dataclasses import astuple, replace
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


def test_older_catalogue_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "catalogue.sqlite")
    db.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
    db.execute("INSERT INTO meta VALUES ('identity', '{}')")
    db.commit()
    with pytest.raises(StoreMismatchError, match="another version"):
        Catalogue.open(tmp_path, IDENTITY)
    assert db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall() == [("meta",)]
    db.close()


def test_identity_without_one_of_its_fields_is_not_completed_with_a_default(tmp_path: Path) -> None:
    Catalogue.open(tmp_path, IDENTITY).close()
    db = sqlite3.connect(tmp_path / "catalogue.sqlite")
    db.execute("UPDATE meta SET value = json_remove(value, '$.layout')")
    db.commit()
    db.close()
    with pytest.raises(StoreMismatchError, match="another version"):
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
    st.tuples(
        st.sampled_from(["ready", "mark evicted", "mark pending", "evict", "evict, kept elsewhere", "bury"]),
        st.just(""),
        st.lists(KEYS, max_size=3),
    ),
)


class Model:
    """What a catalogue should say, in plain sets."""

    def __init__(self) -> None:
        self.owners: dict[str, set[str]] = {}
        self.states: dict[str, str] = {}
        self.doomed: dict[str, bool] = {}  # whether the KV stays ready elsewhere

    def own(self, owner: str, keys: list[str]) -> list[str]:
        """The orphans."""
        before = self.owners.pop(owner, set())
        if keys:
            self.owners[owner] = set(keys)
        for key in keys:
            self.doomed.pop(key, None)
            self.states[key] = "pending" if self.states.get(key) in (None, "evicted") else self.states[key]
        orphans = sorted(before - set().union(*self.owners.values()))
        for key in orphans:
            del self.states[key]
            self.doomed[key] = False
        return orphans

    def owned_by_others(self, owner: str) -> set[str]:
        return set().union(*(keys for other, keys in self.owners.items() if other != owner))

    def state(self, keys: list[str], state: str) -> None:
        self.states.update({key: state for key in keys if key in self.states})

    def may_be_deleted(self) -> set[str]:
        wanted = {key for key, state in self.states.items() if state != "evicted"}
        return {key for key, kept in self.doomed.items() if kept or key not in wanted}


def take_step(catalogue: Catalogue, model: Model, action: str, owner: str, keys: list[str]) -> None:
    """Do the same to both."""
    if action == "register":
        assert sorted(catalogue.register(owner, rows(*keys))) == model.own(owner, keys)
    elif action == "release":
        alone = sorted(catalogue.only_of(owner))
        assert alone == sorted(model.owners.get(owner, set()) - model.owned_by_others(owner))
        assert sorted(catalogue.release(owner)) == model.own(owner, [])
    elif action == "ready":
        for key in keys:
            known = key in model.states
            assert catalogue.mark_ready(key, 10) == known
            if known:
                model.doomed.pop(key, None)
        model.state(keys, "ready")
    elif action == "bury":
        catalogue.buried(keys)
        for key in keys:
            model.doomed.pop(key, None)
    elif action.startswith("mark"):
        catalogue.mark(keys, "evicted" if action.endswith("evicted") else "pending")
        model.state(keys, action.removeprefix("mark "))
    else:
        kept = action != "evict"
        catalogue.evict(keys, keep_ready=kept)
        model.doomed.update(dict.fromkeys(keys, kept))
        if not kept:
            model.state(keys, "evicted")


@settings(deadline=None, max_examples=80)
@given(st.lists(STEPS, max_size=20))
def test_chunk_is_kept_exactly_as_long_as_somebody_owns_it(steps: list[tuple[str, str, list[str]]]) -> None:
    """And its file is doomed from the moment that nobody does until it is gone or wanted again."""
    model = Model()
    with TemporaryDirectory() as folder:
        catalogue = Catalogue.open(Path(folder), IDENTITY)
        for step in steps:
            take_step(catalogue, model, *step)
            states = model.states
            kinds = ("ready", "pending", "evicted")
            by_state = {kind: {key for key in states if states[key] == kind} for kind in kinds}
            assert {owner: set(keys) for owner, keys in catalogue.owners().items()} == model.owners
            assert {entry.key: entry.state for entry in catalogue.entries()} == states
            assert catalogue.ready([*states, "unknown"]) == by_state["ready"]
            assert sorted(catalogue.recent()) == sorted((key, 10) for key in by_state["ready"])
            assert {entry.key for entry in catalogue.pending()} == by_state["pending"]
            assert sorted(catalogue.pending_keys()) == sorted(by_state["pending"])
            assert catalogue.pending_among([*states, "unknown"]) == by_state["pending"]
            assert catalogue.ready_from("k") == by_state["ready"] == set().union(
                *(catalogue.ready_from(f"k{n}") for n in range(6))
            )
            assert sorted(catalogue.doomed()) == sorted(model.may_be_deleted())
            assert catalogue.known() == catalogue.known([*states, "unknown"]) == set(states)
            assert all(catalogue.knows(f"k{n}") == (f"k{n}" in states) for n in range(6))
            totals = catalogue.totals()
            assert (totals.chunks, totals.owners) == (len(states), len(model.owners))
            assert [totals.ready, totals.pending, totals.evicted] == [len(keys) for keys in by_state.values()]
            assert (totals.bytes, totals.tokens) == (10 * len(by_state["ready"]), 3 * len(states))
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


@pytest.mark.parametrize("prefix", ["", "a", "a%", "a_", "\U0010ffff", "b"])
def test_owners_with_a_prefix_are_those_and_no_others(catalogue: Catalogue, prefix: str) -> None:
    names = {"a", "a%b", "a_b", "ab", "A", "a\U0010ffff", "\U0010ffff", "\U0010ffff!", "", "b"}
    for name in names:
        catalogue.register(name, rows("k"))
    assert set(catalogue.owners(prefix)) == {name for name in names if name.startswith(prefix)}


def test_used_chunks_are_listed_last(catalogue: Catalogue) -> None:
    catalogue.register("doc", rows("a", "b", "c"))
    for key in "abc":
        catalogue.mark_ready(key, 1)
    catalogue.touch({"b": (2**62, 1), "a": (2**62 + 1, 1)})
    assert catalogue.recent() == [("c", 1), ("b", 1), ("a", 1)]


def test_clock_that_was_set_back_does_not_age_what_was_just_used(catalogue: Catalogue) -> None:
    catalogue.register("doc", rows("a", "b"))
    for key in "ab":
        catalogue.mark_ready(key, 1)
    catalogue.touch({"a": (2_000, 1), "b": (1_000, 1)})
    catalogue.touch({"a": (500, 1)})
    assert [key for key, _ in catalogue.recent()] == ["b", "a"]


def test_uses_add_up_by_owner_and_survive_being_closed(tmp_path: Path) -> None:
    for n in range(2):
        catalogue = Catalogue.open(tmp_path, IDENTITY)
        if n == 0:
            for owner, keys in (("one", "ab"), ("two", "bc"), ("none", "d")):
                catalogue.register(owner, rows(*keys))
        catalogue.touch({"b": (1, 3), "c": (1, 2), "gone": (1, 9)})
        catalogue.count("ram", {"hits": 5, "misses": 0})
        catalogue.count("disk", {"hits": 1})
        catalogue.close()
    catalogue = Catalogue.open(tmp_path, IDENTITY)
    assert [astuple(row) for row in catalogue.reuse(2)] == [("two", 2, 6, 10), ("one", 2, 6, 6)]
    assert catalogue.counters() == {"ram": {"hits": 10, "misses": 0}, "disk": {"hits": 2}}
    catalogue.close()


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
    catalogue.close()


# -- permissions ----------------------------------------------------------------------------------------


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def test_texts_can_be_read_by_nobody_else(tmp_path: Path) -> None:
    catalogue = Catalogue.open(tmp_path / "index", IDENTITY)
    catalogue.register("doc", rows("a"))
    assert stat.S_IMODE((tmp_path / "index").stat().st_mode) == 0o700
    made = modes(tmp_path / "index")
    assert len(made) > 1 and set(made.values()) == {0o600}  # the write-ahead log as well
    catalogue.close()


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
        process = start(READER, root)
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
