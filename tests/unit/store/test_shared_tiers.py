"""A tier that several stores use: what one has put there, and what none may do to the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from blendrag.store.catalogue import Catalogue
from blendrag.store.record import Layout, Miss
from blendrag.store.tiers import TierSpec
from stores import (
    IDENTITY,
    A,
    B,
    C,
    files,
    get,
    holds,
    make_chunk,
    open_stack,
    problems,
    put,
    register,
    same,
    shared,
    states,
    wanted,
)

RAM, DISK = TierSpec(kind="ram", bytes=1 << 20), TierSpec(kind="disk")


def test_two_stores_reuse_each_others_chunks_over_a_shared_tier(tmp_path: Path) -> None:
    common = shared(tmp_path / "common", write="behind")
    one, two = tmp_path / "one", tmp_path / "two"
    for root in (one, two):
        register(root, [A, B])
    first = open_stack(one, RAM, DISK, common)
    put(first, A)
    first.wait()
    second = open_stack(two, RAM, DISK, common)
    assert second.adopt(wanted(A, B, C)) == {A.key}  # B nobody has, C nobody knows
    assert states(two) == {A.key: "ready", B.key: "pending"}
    assert files(two) == {f"{A.key}.safetensors"}
    assert second.adopt([(B.key, A.token_ids)]) == set()
    first.close()
    assert same(get(second, A), A)
    second.close()
    assert problems(one) == problems(two) == []


def test_half_of_a_chunk_is_not_adopted_for_the_whole(tmp_path: Path) -> None:
    common = shared(tmp_path / "common")
    register(tmp_path / "one", [A])
    store = open_stack(tmp_path / "one", DISK, common)
    put(store, A)
    store.close()
    register(tmp_path / "two", [A])
    store = open_stack(tmp_path / "two", DISK, common)
    assert store.adopt([(A.key, A.token_ids[:4])]) == set()
    assert states(tmp_path / "two") == {A.key: "pending"}


def test_tier_that_is_only_read_is_never_changed(tmp_path: Path) -> None:
    """Not even for a damaged record, or one that was deleted here."""
    library = tmp_path / "library"
    register(tmp_path / "one", [A, B])
    store = open_stack(tmp_path / "one", shared(library))
    put(store, A)
    put(store, B)
    store.close()
    (bad,) = library.rglob(f"{B.key}.safetensors")
    bad.write_bytes(b"damaged")
    before = {path: path.stat().st_mtime_ns for path in library.rglob("*")}
    register(tmp_path / "two", [A, B])
    store = open_stack(tmp_path / "two", RAM, DISK, shared(library, write="never"))
    assert same(get(store, A), A)
    assert holds(store, A) == [[True], [True], [True]]  # home has it, too, from now on
    assert get(store, B) == Miss("damaged")
    assert store.delete([A.key, B.key]) == (1, [])
    assert holds(store, A)[0] == [False]
    store.close()
    assert {path: path.stat().st_mtime_ns for path in library.rglob("*")} == before


def test_namespaces_do_not_get_each_others_kv_even_with_equal_text(tmp_path: Path) -> None:
    common = shared(tmp_path / "common")
    tenants = {name: replace(IDENTITY, namespace=name) for name in ("a", "b")}
    chunks = {name: make_chunk(1, identity=identity) for name, identity in tenants.items()}
    assert chunks["a"].token_ids == chunks["b"].token_ids
    assert chunks["a"].key != chunks["b"].key
    opened = {}
    for name, identity in tenants.items():
        catalogue = Catalogue.open(tmp_path / name, identity)
        catalogue.register("doc", [(chunk.key, "", chunk.token_ids) for chunk in chunks.values()])
        catalogue.close()
        opened[name] = open_stack(tmp_path / name, DISK, common, identity=identity)
    put(opened["a"], chunks["a"])
    for key in (chunks["a"].key, chunks["b"].key):  # even if b learns a's key
        assert opened["b"].get(key, chunks["b"].token_ids) == Miss("missing")
        assert opened["b"].adopt([(key, chunks["b"].token_ids)]) == set()
    (record,) = (tmp_path / "common").rglob("*.safetensors")
    for key in (chunks["a"].key, chunks["b"].key):  # nor if it is copied over to b's folder
        theirs = tmp_path / "common" / Layout(tenants["b"], "bfloat16").digest / key[:2]
        theirs.mkdir(exist_ok=True)
        (theirs / f"{key}.safetensors").write_bytes(record.read_bytes())
        assert opened["b"].get(key, chunks["b"].token_ids) == Miss("damaged")
    for store in opened.values():
        store.close()
