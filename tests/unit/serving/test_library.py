"""Texts whose KV is kept. No engine is started here."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag import machine
from blendrag.engine.client.stores import StoreClient
from blendrag.errors import (
    BlendragWarning,
    ConfigError,
    EngineError,
    StoreError,
    StoreFullError,
    StoreMismatchError,
)
from blendrag.options import BlendOptions
from blendrag.serving.collection import Collection
from blendrag.serving.evidence import Evidence
from blendrag.serving.library import Library
from blendrag.serving.prefixes import Prefixes
from blendrag.settings import Settings
from stored_trees import tree_tiers

SETTINGS = Settings.load(max_model_len=512)
LONG = "The warranty of the battery lasts for eight years or 160,000 kilometres. " * 4


@pytest.fixture
def library(tmp_path: Path, model_dir: Path) -> Iterator[Library]:
    opened = Library(tmp_path / "kv", SETTINGS)
    yield opened
    opened.close()


@functools.cache
def shared_library() -> Library:
    """Of all examples; the tokenizer is read once."""
    folder = tempfile.mkdtemp()
    opened = Library(Path(folder), SETTINGS)
    atexit.register(shutil.rmtree, folder)
    atexit.register(opened.close)
    return opened


def texts(library: Library) -> list[str]:
    return [entry.text for entry in library.catalogue.entries()]


def test_text_is_kept_without_the_blanks_around_it(library: Library) -> None:
    library.texts.register({"a": ["  a text \n"], "b": ["a text"], "c": [" \n "]})
    assert texts(library) == ["a text"]


def test_text_alone_is_kept_whole(library: Library) -> None:
    documents = Collection(library, "c")._owned({"a": "Of a fjord.", "b": ["Of b."]}, None)
    library.texts.register(*documents)
    assert {entry.text for entry in library.catalogue.entries()} == {"Of a fjord.", "Of b."}


def test_text_of_two_owners_goes_with_the_last_of_them(library: Library) -> None:
    library.texts.register({"a": ["shared", "own"], "b": ["shared"]})
    library.texts.release(["a", "nobody"])
    assert texts(library) == ["shared"]
    library.texts.register({"b": ["other"]})
    assert texts(library) == ["other"]


def standing(library: Library) -> dict[str, list[str]]:
    """What each text was prefilled behind, nearest first. KeyError for a text that is not kept."""
    entries = {entry.key: entry for entry in library.catalogue.entries()}
    found = {}
    for entry in entries.values():
        at, behind = entry, list[str]()
        while at.after:
            at = entries[at.after]
            behind.append(at.text)
        found[entry.text] = behind
    return found


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"), st.dictionaries(st.integers(0, 9), st.integers(0, 12), min_size=1, max_size=5)
        ),
        st.tuples(st.just("remove"), st.sets(st.integers(0, 9), min_size=1, max_size=3)),
    ),
    max_size=8,
)


@given(STEPS)
def test_kv_does_not_outlive_a_text_that_it_has_read(steps: list[tuple[str, Any]]) -> None:
    """Of two sources, whose parts come, change and go one by one."""
    library, held = shared_library(), dict[str, str]()
    library.texts.release(library.catalogue.owners())
    for action, what in steps:
        if action == "add":
            new = {f"owner {n}": f"Text number {text}." for n, text in what.items()}
            sources = {owner: f"source {n % 2}" for n, owner in zip(what, new, strict=True)}
            changed = {owner for owner, text in new.items() if held.get(owner) != text}
            assert library.texts.register({owner: [text] for owner, text in new.items()}, sources) == changed
            held |= new
        else:
            library.texts.release([f"owner {n}" for n in what])
            held = {owner: text for owner, text in held.items() if int(owner[6:]) not in what}
        owners = library.catalogue.owners()
        by_key = {entry.key: entry.text for entry in library.catalogue.entries()}
        assert {owner: [by_key[key] for key in keys] for owner, keys in owners.items()} == {
            owner: [text] for owner, text in held.items()
        }
        assert set(standing(library)) == set(held.values())  # a key of a text that has left is a KeyError
        for entry in library.catalogue.entries():
            assert bool(entry.after) == bool(entry.context)


def test_parts_of_a_document_are_prefilled_behind_each_other(library: Library) -> None:
    documents = {owner: [owner.upper()] for owner in ("a1", "b1", "a2", "alone", "b2", "a3")}
    sources = {owner: owner[0] for owner in documents if owner != "alone"}
    assert library.texts.register(documents, sources) == set(documents)
    whole = {"A1": [], "A2": ["A1"], "A3": ["A2", "A1"], "ALONE": [], "B1": [], "B2": ["B1"]}
    assert standing(library) == whole
    assert library.texts.register({"a2": ["A2"], "a4": ["A4"]}, {"a2": "a", "a4": "a"}) == {"a4"}
    assert standing(library) == whole | {"A4": ["A2", "A1"]}


def test_what_stood_behind_a_removed_part_stands_alone(library: Library) -> None:
    owners = ["a", "b", "c", "d"]
    library.texts.register({owner: [f"Text {owner}."] for owner in owners}, dict.fromkeys(owners, "source"))
    library.texts.release(["b"])
    assert standing(library) == {"Text a.": [], "Text c.": [], "Text d.": ["Text c."]}
    assert library.texts.register({"c": ["Another."]}) == {"c"}
    assert standing(library) == {"Text a.": [], "Another.": [], "Text d.": []}
    assert library.plan([{"role": "user", "content": "Text d."}]).describe()


def test_forms_of_a_text_stand_behind_the_same_forms(library: Library) -> None:
    library.texts.register({"1": ["one", "meta one"], "2": ["two", "meta two"]}, {"1": "s", "2": "s"})
    assert standing(library) == {"one": [], "meta one": [], "two": ["one"], "meta two": ["meta one"]}


def test_prompt_is_planned_over_the_texts_of_now(library: Library) -> None:
    def reused(content: str) -> int:
        return library.plan([{"role": "user", "content": content}]).cached_tokens

    assert reused(LONG) == 0  # the texts are read from the catalogue here
    library.texts.register({"a": [LONG]})
    assert reused(LONG) == len(library.catalogue.entries()[0].token_ids)
    library.texts.release(["a"])
    assert reused(LONG) == 0


def test_removed_kv_is_warned_about(library: Library) -> None:
    library.texts.register({"a": [LONG]})
    with pytest.warns(BlendragWarning, match=r"1 of 2 documents .* sync\(\)"):
        library.prefetch([LONG, "Never registered."])
    with warnings.catch_warnings(action="error"):
        library.prefetch(["Never registered."])  # once is enough
        library.prefetch([f" {LONG}", "  "])


def with_tree(root: Path, **options: Any) -> tuple[Library, Path]:
    """A library with exact prefixes on disk, by default, and a file of theirs."""
    node = root / "tree" / "kv" / "node"
    node.parent.mkdir(parents=True, exist_ok=True)
    node.touch()
    return Library(root, Settings.load(**{"tiers": tree_tiers(disk=1 << 20), **options})), node


def test_document_that_is_deleted_without_an_engine_leaves_exact_prefixes(
    tmp_path: Path, model_dir: Path
) -> None:
    """And those of a setting that is gone, or of a memory that is, stay on disk."""
    kept, node = with_tree(tmp_path)
    kept.texts.register({"a": ["Some text of a document."]})
    assert node.exists()
    kept.texts.release(["a"])
    assert not node.exists()
    kept.close()
    for tiers in (None, tree_tiers(1 << 20)):
        with_tree(tmp_path, tiers=tiers)[0].close()
        assert not node.exists()


def test_tree_of_a_folder_that_is_open_elsewhere_is_kept(tmp_path: Path, model_dir: Path) -> None:
    kept, node = with_tree(tmp_path)
    Library(tmp_path, SETTINGS, shared=True).close()
    kept.close()
    assert node.exists()


def test_tree_that_cannot_be_used_fails_neither_a_prompt_nor_the_start(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise StoreFullError("the catalogue failed: disk is full")

    plan = library.plan([{"role": "user", "content": "Hello."}])
    broken: Any = SimpleNamespace(alive=True, path=fails, failed=0, close=lambda: None)
    library.sidecars.prefixes = broken
    with pytest.warns(BlendragWarning, match="disk is full"):
        assert library.sidecars.path(plan, None) == (None, None)
    with warnings.catch_warnings(action="error"):
        assert library.sidecars.path(plan, None) == (None, None) and broken.failed == 2  # once is enough
    library.sidecars.prefixes, library.sidecars._warned = None, False
    library.sidecars._has_tree = True
    monkeypatch.setattr(Prefixes, "open", fails)
    engine: Any = SimpleNamespace()
    with pytest.warns(BlendragWarning, match="disk is full"):
        library.sidecars._open_prefixes(engine)
    assert library.sidecars.prefixes is None


def test_tree_that_is_not_kept_is_warned_about(tmp_path: Path, model_dir: Path) -> None:
    asked = Settings.load(tiers=tree_tiers(1 << 20))
    for blocks, alone, reason in (("", True, None), ("blocks", False, None), ("states", False, "a hybrid")):
        library = Library(tmp_path / f"kept{blocks}", asked, shared=not alone)
        facts = SimpleNamespace(blocks=blocks, reason=reason, states=bool(reason))
        several: Any = SimpleNamespace(facts=facts, alone=alone)
        with pytest.warns(BlendragWarning, match="several engines or API servers"):
            library.sidecars._open_prefixes(several)
        assert library.sidecars.prefixes is None
        library.close()


def test_no_prefixes_are_opened_behind_the_end(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(tmp_path, Settings.load(tiers=tree_tiers(1 << 20)))
    library.close()
    monkeypatch.setattr(Prefixes, "open", lambda *_: pytest.fail("nobody closes them"))
    engine: Any = SimpleNamespace()
    library.sidecars._open_prefixes(engine)
    assert library.sidecars.prefixes is None


def test_tree_is_kept_while_it_is_opened(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though something is deleted meanwhile, which goes through the opened one then."""
    library, node = with_tree(tmp_path)
    library.texts.register({"a": ["Some text of a document."]})
    deleting = threading.Thread(target=library.texts.release, args=(["a"],), daemon=True)
    forgotten = list[str]()
    prefixes: Any = SimpleNamespace(alive=True, forget=forgotten.extend, close=lambda: None)

    def opened(*_: Any) -> Any:
        deleting.start()
        deleting.join(0.3)  # it waits for us, or has removed the folder by then
        return prefixes

    monkeypatch.setattr(Prefixes, "open", opened)
    (key,) = library.catalogue.known()
    engine: Any = SimpleNamespace()
    library.sidecars._open_prefixes(engine)
    deleting.join(60)
    assert node.exists() and forgotten == [key]
    library.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"selector": "hkvdd"}, "hkvdd"),
        ({"kv_budget": "512:adda"}, "started with the setting kv_budget"),
        ({"selector": "hkvd:metric=q"}, "metric must be"),
        ({"kv_budget": 512}, "started with the setting kv_budget"),
    ],
)
def test_typing_error_in_an_option_is_a_clear_error(
    library: Library, options: dict[str, Any], said: str
) -> None:
    plan = library.plan([{"role": "user", "content": "Hello."}])
    with pytest.raises(ConfigError, match=said):
        library.recipe(plan, BlendOptions(**options))


def test_folder_that_cannot_be_or_has_a_broken_catalogue_is_a_clear_error(
    tmp_path: Path, model_dir: Path
) -> None:
    (tmp_path / "catalogue.sqlite").write_text("no database")
    for root in (tmp_path / "catalogue.sqlite" / "kv", tmp_path):
        with pytest.raises(StoreError, match="catalogue"):
            Library(root, SETTINGS)


def test_tree_of_a_negative_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="tree_bytes"):
        Settings.load(tiers=tree_tiers(-1))


def test_codec_that_does_not_exist_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'zip'; there are fp8, int4, int8, raw"):
        Library(tmp_path / "kv", Settings.load(codec="zip"))
    assert not (tmp_path / "kv").exists()


def test_index_keeps_the_codec_that_it_was_made_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def codec(name: str, gpu: bool, **options: Any) -> str:
        monkeypatch.setattr(machine, "_NVIDIA", tmp_path if gpu else tmp_path / "none")
        library = Library(tmp_path / name, Settings.load(max_model_len=512, **options))
        library.close()
        return library.identity.codec

    assert [codec("cpu", gpu) for gpu in (False, True)] == ["raw", "raw"]
    assert [codec("gpu", gpu) for gpu in (True, False)] == ["int8", "int8"]
    assert codec("said", True, codec="raw") == codec("said", True) == "raw"
    with pytest.raises(StoreMismatchError, match="codec='int8', not codec='raw'"):
        codec("gpu", True, codec="raw")


def test_texts_behind_another_system_prompt_are_not_taken_for_the_same(tmp_path: Path) -> None:
    def opened(name: str, **options: Any) -> Library:
        return Library(tmp_path / name, Settings.load(max_model_len=512, **options))

    keys = []
    for at, options in enumerate(({}, {"system_prompt": "Be brief."})):
        for shared in ("none", "system"):
            library = opened(f"{at}-{shared}", shared_prefix=shared, **options)
            library.texts.register({"a": [LONG]})
            keys.append(library.catalogue.known())
            library.close()
    alone, behind, still_alone, behind_another = keys
    assert alone == still_alone
    assert not behind & alone and not behind & behind_another
    with pytest.raises(StoreMismatchError, match="shared_prefix='none', not shared_prefix='system'"):
        opened("0-none", shared_prefix="system")


def test_search_does_not_fail_by_what_it_would_have_read_ahead(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.texts.register({"a": [LONG]})
    forked = Mock(alive=True, call_later=Mock(side_effect=EngineError("it belongs to another process")))
    with monkeypatch.context() as patch:
        patch.setattr(library.session, "_store", StoreClient(forked, "store"))
        library.prefetch([LONG])
    assert forked.call_later.called
    library.catalogue.close()
    library.prefetch([LONG])


def test_answer_does_not_wait_for_documents_that_are_being_registered(library: Library) -> None:
    library.texts.register({"a": [text := f'"{LONG}"\n' * 4]})
    plan = library.plan(f"Of this: {json.dumps(text)}")
    taken, go = threading.Event(), threading.Event()

    def register() -> None:
        with library.texts.changing.mine():
            taken.set()
            go.wait(50)

    other = threading.Thread(target=register)
    other.start()
    assert taken.wait(50) and plan.forms
    answered = threading.Thread(target=library.answered, args=(plan, Evidence(prompt=1), "?", None, 0.0))
    answered.start()
    answered.join(20)
    waits = answered.is_alive()
    go.set()
    other.join()
    assert not waits and len(library.catalogue.entries()) == 1
    library.answered(plan, Evidence(prompt=1), "?", None, 0.0)
    assert len(library.catalogue.entries()) == 2, "learnt from the next"


class _Silent:
    """An engine that takes what it is asked for and never answers; ``call``, which would wait, it has not."""

    alive = True

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str]]] = []
        self.begun: list[Future[None]] = []

    def calls_later(self, *calls: Any) -> Future[None]:
        self.asked += [(operation, [chunk[0] for chunk in args[1]]) for operation, *args in calls if args[1:]]
        self.begun.append(Future())
        return self.begun[-1]


def test_answer_does_not_wait_until_chunks_were_looked_for(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.texts.register({"a": ["lost"], "b": ["unreachable"]})
    key = {entry.text: entry.key for entry in library.catalogue.entries()}
    library.catalogue.mark([key["unreachable"]], "ready")
    engine = _Silent()
    with monkeypatch.context() as patch:
        patch.setattr(library.session, "_store", StoreClient(engine, "store"))  # type: ignore[arg-type]
        patch.setattr(library.session, "later", lambda work: None)
        tokens = library.texts.repair(key.values())
        asked = [("ingest", [key["lost"]]), ("check", [key["unreachable"]])]
        assert library.texts.repair(key.values()) == tokens and engine.asked == asked, "once for all prompts"
        library.catalogue.mark([key["unreachable"]], "pending")
        library.texts.repair(key.values())
        assert engine.asked[2:] == [("ingest", [key["unreachable"]])], "which nobody has begun"
        engine.begun[0].cancel()
        library.texts.repair(key.values())
        assert engine.asked[3:] == [("ingest", [key["lost"]])], "again, as the first has ended"
    assert tokens == sum(len(entry.token_ids) for entry in library.catalogue.entries_of([key["lost"]]))
