"""What a catalogue says of chunks, owners and uses, whatever was done to it."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.errors import StoreError, StoreFullError
from blendrag.serving.owners import SEPARATOR, owner_of
from blendrag.store.catalogue import Catalogue, Totals
from blendrag.store.contexts import Chunk, Contexts, Ids
from stores import IDENTITY, rows


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    return Catalogue.open(tmp_path, IDENTITY)


KINDS = ("ready", "pending", "evicted")
KEYS = st.sampled_from([f"k{n}" for n in range(6)])
OWNERS = st.sampled_from(
    ["one", "two", "three", *(owner_of("a", n) for n in "12"), *(owner_of("ab", n) for n in "12")]
)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["register", "register, three inherits"]), OWNERS, st.lists(KEYS, max_size=6)),
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

    def own(self, owner: str, keys: list[str], heir: str | None = None) -> list[str]:
        """The orphans."""
        before = self.owners.pop(owner, set())
        if keys:
            self.owners[owner] = set(keys)
        if heir and heir != owner and before - set(keys):
            self.owners.setdefault(heir, set()).update(before - set(keys))
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

    def collections(self) -> dict[str, Totals]:
        named: dict[str, dict[str, set[str]]] = {}
        for owner, keys in self.owners.items():
            if (name := owner.partition(SEPARATOR)[0]) != owner:
                named.setdefault(name, {})[owner] = keys
        return {name: self.totals(set().union(*of.values()), len(of)) for name, of in named.items()}

    def totals(self, keys: set[str], owners: int) -> Totals:
        kinds = [sum(self.states[key] == kind for key in keys) for kind in KINDS]
        return Totals(len(keys), *kinds, 3 * len(keys), 10 * kinds[0], owners)

    def may_be_deleted(self) -> set[str]:
        wanted = {key for key, state in self.states.items() if state != "evicted"}
        return {key for key, kept in self.doomed.items() if kept or key not in wanted}


def take_step(catalogue: Catalogue, model: Model, action: str, owner: str, keys: list[str]) -> None:
    """Do the same to both."""
    if action.startswith("register"):
        heir = "three" if action != "register" else None
        assert sorted(catalogue.register(owner, rows(*keys), heir=heir)) == model.own(owner, keys, heir)
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


@given(st.lists(STEPS, max_size=20))
def test_chunk_is_kept_exactly_as_long_as_somebody_owns_it(steps: list[tuple[str, str, list[str]]]) -> None:
    """And its file is doomed from the moment that nobody does until it is gone or wanted again."""
    model = Model()
    with TemporaryDirectory() as folder:
        catalogue = Catalogue.open(Path(folder), IDENTITY)
        for step in steps:
            take_step(catalogue, model, *step)
            states = model.states
            by_state = {kind: {key for key in states if states[key] == kind} for kind in KINDS}
            assert {owner: set(keys) for owner, keys in catalogue.owners().items()} == model.owners
            assert {entry.key: entry.state for entry in catalogue.entries()} == states
            assert catalogue.ready([*states, "unknown"]) == by_state["ready"]
            assert sorted(catalogue.recent()) == sorted((key, 10) for key in by_state["ready"])
            assert {entry.key for entry in catalogue.pending()} == by_state["pending"]
            assert sorted(catalogue.pending_keys()) == sorted(by_state["pending"])
            assert catalogue.pending_among([*states, "unknown"]) == by_state["pending"]
            assert catalogue.ready_from("k") == by_state["ready"]
            assert set().union(*(catalogue.ready_from(f"k{n}") for n in range(6))) == by_state["ready"]
            assert sorted(catalogue.doomed()) == sorted(model.may_be_deleted())
            assert catalogue.known() == catalogue.known([*states, "unknown"]) == set(states)
            assert all(catalogue.knows(f"k{n}") == (f"k{n}" in states) for n in range(6))
            assert catalogue.totals() == model.totals(set(states), len(model.owners))
            collections = model.collections()
            assert catalogue.collections("", "", 9) == (collections, len(collections))
        catalogue.close()


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
    with pytest.raises(StoreError), catalogue._transaction() as db:
        db.execute("PRAGMA defer_foreign_keys = ON")  # checked, and refused, by COMMIT only
        db.execute("INSERT INTO owners VALUES ('doc', 'no such chunk')")
    catalogue.register("doc", rows("a"))
    assert catalogue.owners() == {"doc": ["a"]}


def test_full_disk_under_the_catalogue_is_called_so_and_changes_nothing(catalogue: Catalogue) -> None:
    db = catalogue._db
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
    assert catalogue.owned([prefix, "a%", "nobody"]) == names & {prefix}


def test_owners_are_told_apart_whatever_signs_are_in_their_names(catalogue: Catalogue) -> None:
    names = ["a", "a\0b", "a\0", "a%00b", "a%", "a%\0", "a%25", "\0", "\0%00", "\U0010ffff"]
    for key, name in enumerate(names):
        catalogue.register(name, rows(str(key), "shared"))
    others = list(map("{}\0".format, range(40_000)))
    for key, name in enumerate(names):
        assert catalogue.owned([name, *others, "b\0"]) == {name}
        assert catalogue.only_of(name, *others) == [str(key)]
    assert sorted(catalogue.only_of(*others, *names)) == [*map(str, range(len(names))), "shared"]


def test_used_chunks_are_listed_last_also_if_the_clock_was_set_back(catalogue: Catalogue) -> None:
    catalogue.register("doc", rows("a", "b", "c"))
    for key in "abc":
        catalogue.mark_ready(key, 1)
    catalogue.touch({"b": (2**62, 1), "a": (2**62 + 1, 1)})
    catalogue.touch({"a": (500, 1)})
    assert catalogue.recent() == [("c", 1), ("b", 1), ("a", 1)]


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


def form_of(base: str, number: int) -> Chunk:
    return Chunk(f"{base}-form{number}", f"form {number} of {base}", (1, 2, number))


def test_form_has_the_owners_of_its_text_and_leaves_with_it(catalogue: Catalogue) -> None:
    text, other = Chunk("a", "text", (1, 2, 3)), Chunk("b", "other", (4, 5, 6))
    catalogue.register("one", [text, other])
    catalogue.register("two", [text])
    assert catalogue.add_form("a", form_of("a", 0), most=2)
    assert catalogue.owners() == {"one": ["a", "a-form0", "b"], "two": ["a", "a-form0"]}
    assert catalogue.texts_of("one") == {"text", "other"} and len(catalogue.chunks_of("two")) == 1
    assert catalogue.register("one", [text, other]) == [], "what has not changed keeps its forms"
    assert "a-form0" in catalogue.known()
    assert catalogue.release("two") == [] and catalogue.knows("a-form0")
    assert sorted(catalogue.register("one", [other])) == ["a", "a-form0"]
    assert catalogue.known() == {"b"}


def test_text_has_no_more_forms_than_allowed_and_each_once(catalogue: Catalogue) -> None:
    catalogue.register("one", [Chunk("a", "text", (1, 2, 3))])
    added = [catalogue.add_form("a", form_of("a", number), most=2) for number in (0, 0, 1, 2)]
    assert added == [True, False, True, False]
    assert not catalogue.add_form("gone", form_of("gone", 0), most=2)
    _, changed = catalogue.changes(0)
    assert changed == ["a", "a-form0", "a-form1"]
    assert sorted(catalogue.release("one")) == ["a", "a-form0", "a-form1"]
    assert catalogue.register("one", [Chunk("a", "text", (1, 2, 3))]) == []
    assert catalogue.add_form("a", form_of("a", 0), most=1), "forms of before are forgotten"


@pytest.mark.parametrize("first", [True, False])
def test_form_that_is_another_documents_text_is_left_to_that(catalogue: Catalogue, first: bool) -> None:
    """Whichever comes first."""
    form = Chunk("b", "form", (4, 5, 6))
    catalogue.register("one", [Chunk("a", "text", (1, 2, 3))])
    if first:
        assert catalogue.add_form("a", form, most=4)
    catalogue.register("two", [form])
    assert not catalogue.add_form("a", form, most=4)
    assert catalogue.texts_of("two") == {"form"} and [one.key for one in catalogue.chunks_of("two")] == ["b"]
    assert catalogue.release("one") == ["a"]
    assert catalogue.known() == {"b"}


# -- what a chunk stands behind -------------------------------------------------------------------------

IDS = st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple)
CHUNKS = st.lists(IDS, min_size=1, max_size=12, unique=True)


def document(contexts: Contexts, chunks: list[Ids], before: Ids = ()) -> list[Chunk]:
    return contexts.document((("", ids) for ids in chunks), Chunk("", "", before) if before else None)


@given(CHUNKS, st.integers(0, 200), st.none() | st.integers(0, 80), IDS)
def test_context_is_within_its_limit_and_the_documents_text_before_the_chunk(
    chunks: list[Ids], limit: int, room: int | None, before: Ids
) -> None:
    written = (*before, 7)
    for chunk in document(Contexts(IDENTITY, (7,), limit, room), chunks, before):
        assert len(chunk.context) <= limit
        assert room is None or not chunk.context or len(chunk.context) + len(chunk.token_ids) <= room
        assert written[len(written) - len(chunk.context) :] == chunk.context
        assert room is not None or len(chunk.context) == min(limit, len(written))
        written += (*chunk.token_ids, 7)


def test_chunk_that_comes_twice_is_prefilled_once() -> None:
    one, other = (1, 2), (3, 4)
    first, second, third = document(Contexts(IDENTITY, (), 100), [one, other, one])
    assert (first.context, second.context) == ((), one)
    assert third == first


def test_chunk_has_no_context_where_none_is_wanted() -> None:
    for chunk in document(Contexts(IDENTITY, (7,), 0), [(1,), (2,)], before=(3,)):
        assert not chunk.context and not chunk.after
        assert chunk.key == IDENTITY.chunk_key(chunk.token_ids)


@given(CHUNKS, st.integers(0, 11), st.integers(1, 8))
def test_chunks_that_have_read_other_text_have_keys_of_their_own(
    chunks: list[Ids], changed: int, limit: int
) -> None:
    """However short contexts are: KV of a context has itself read what was before it."""
    changed %= len(chunks)
    edited = [*chunks[:changed], (10, 10), *chunks[changed + 1 :]]
    contexts = Contexts(IDENTITY, (), limit)
    ones, others = document(contexts, chunks), document(contexts, edited)
    for number, (one, other) in enumerate(zip(ones, others, strict=True)):
        assert (one.key == other.key) == (number < changed)
        assert one.after == (ones[number - 1].key if number else "")
