"""gc on real folders: all that is useless goes, and nothing else."""

from __future__ import annotations

from pathlib import Path

from blendrag.store.catalogue import Catalogue
from closed import collected, flip, verified, write_record
from stores import IDENTITY, A, B, C, D, make_chunk, make_record, record_of, states


def test_gc_takes_all_that_is_useless_and_nothing_else(root: Path) -> None:
    write_record(root, make_record(make_chunk(99)))
    (root / "kv" / "tmp" / "half").write_bytes(b"12345")
    flip(record_of(root, A.key), -1)
    verified(root, repair=True)
    (root / "kv" / "tmp" / "half").write_bytes(b"12345")
    write_record(root, make_record(make_chunk(99)))
    catalogue = Catalogue.open(root, IDENTITY)
    catalogue.evict([B.key])
    catalogue.evict([C.key], keep_ready=True)
    catalogue.close()
    size = record_of(root, D.key).stat().st_size
    freed = collected(root)
    assert freed.files == {"orphan": 1, "doomed": 2, "quarantined": 1, "half-written": 1}
    assert {kind: freed.bytes[kind] for kind in freed.files} == {
        "orphan": size, "doomed": 2 * size, "quarantined": size, "half-written": 5
    }  # fmt: skip
    left = [path.name for path in (root / "kv").rglob("*") if path.is_file()]
    assert left == [f"{D.key}.safetensors"]
    assert states(root) == {A.key: "pending", B.key: "evicted", C.key: "ready", D.key: "ready"}
    assert collected(root).files == {}


def test_gc_gives_back_what_deleted_texts_took(tmp_path: Path) -> None:
    catalogue = Catalogue.open(tmp_path, IDENTITY)
    catalogue.register("doc", [(f"{n:032x}", f"SECRET {n}" * 1000, (n,)) for n in range(100)])
    catalogue.release("doc")
    catalogue.close()
    before = (tmp_path / "catalogue.sqlite").stat().st_size
    freed = collected(tmp_path)
    assert freed.bytes["catalogue.sqlite"] > 500_000
    assert (tmp_path / "catalogue.sqlite").stat().st_size < before / 10
    assert b"SECRET" not in (tmp_path / "catalogue.sqlite").read_bytes()
