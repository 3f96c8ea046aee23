"""export and import: what arrives is what was there, all of it or nothing."""

from __future__ import annotations

import sqlite3
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from archives import SEGMENT, around, exported, filled
from blendrag.errors import StoreError
from blendrag.index.ledger import Ledger
from blendrag.progress import Progress
from blendrag.store.catalogue import Catalogue
from blendrag.store.maintenance.archive import export_index, import_archive
from blendrag.store.maintenance.closed_index import closed_index
from blendrag.store.maintenance.verify import Verifier
from blendrag.store.tiers import TierSpec
from stores import IDENTITY, A, B, C, open_stack, record_of, register, states


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return filled(tmp_path / "index")


def verified(root: Path) -> tuple[int, int]:
    with closed_index(root) as index:
        report = Verifier(index).run()
    return report.records, report.left


def test_index_arrives_as_it_was(root: Path, tmp_path: Path) -> None:
    file = exported(root, tmp_path / "index.tar")
    header = import_archive(file, tmp_path / "copy")
    assert (header.identity, header.dtype, header.kv, header.files) == (IDENTITY, "bfloat16", True, 7)
    copy = tmp_path / "copy"
    for path in (root / SEGMENT).iterdir():
        assert (copy / path.relative_to(root)).read_bytes() == path.read_bytes()
    for key in (A.key, B.key):
        assert record_of(copy, key).read_bytes() == record_of(root, key).read_bytes()
    assert states(copy) == states(root)
    assert verified(copy) == (2, 0)
    with sqlite3.connect(copy / "chroma" / "chroma.sqlite3") as db:
        assert db.execute("SELECT word FROM words").fetchall() == [("handbook",)]
    store = open_stack(copy, TierSpec(kind="disk"))
    store.close()


def test_nobody_else_can_read_what_arrives_or_the_archive(root: Path, tmp_path: Path) -> None:
    file = exported(root, tmp_path / "index.tar")
    import_archive(file, tmp_path / "copy")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for path in [tmp_path / "copy", *(tmp_path / "copy").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_other_programs_can_read_the_archive(root: Path, tmp_path: Path) -> None:
    file = exported(root, tmp_path / "index.tar")
    with tarfile.open(file) as archive:
        names = archive.getnames()
        assert names[0] == "blendrag.json" and names[-1] == "manifest.txt"
        assert f"kv/{A.key[:2]}/{A.key}.safetensors" in names


def test_changes_that_are_only_in_the_log_are_exported(root: Path, tmp_path: Path) -> None:
    """SQLite's newest rows are not in its main file while a log is open."""
    db = sqlite3.connect(root / "ledger.sqlite")
    db.execute("INSERT INTO documents VALUES ('last', '', '', '[]', 1, 1.0, 1)")
    db.commit()
    exported(root, tmp_path / "index.tar")
    db.close()
    import_archive(tmp_path / "index.tar", tmp_path / "copy")
    ledger = Ledger(tmp_path / "copy")
    assert ledger.sources() == {"last"}
    ledger.close()


def test_export_without_kv_asks_for_prefill_where_it_arrives(root: Path, tmp_path: Path) -> None:
    file = exported(root, tmp_path / "small.tar", kv=False)
    assert not import_archive(file, tmp_path / "copy").kv
    assert states(tmp_path / "copy") == dict.fromkeys((A.key, B.key, C.key), "pending")
    assert states(root)[A.key] == "ready"  # here nothing has changed
    assert verified(tmp_path / "copy") == (0, 0)


def test_what_is_not_there_is_not_promised_where_it_arrives(root: Path, tmp_path: Path) -> None:
    """A chunk that only another tier has; and deletions of this machine's files."""
    record_of(root, A.key).unlink()
    catalogue = Catalogue.open(root, IDENTITY)
    catalogue.evict([B.key], keep_ready=True)
    catalogue.close()
    import_archive(exported(root, tmp_path / "index.tar"), tmp_path / "copy")
    assert states(tmp_path / "copy")[A.key] == "pending"
    catalogue = Catalogue.open(tmp_path / "copy", IDENTITY)
    assert catalogue.doomed() == []
    catalogue.close()


def test_folder_of_a_library_without_documents_can_be_moved(tmp_path: Path) -> None:
    """As the classes for LangChain and LlamaIndex keep it: no ledger, no vectors."""
    register(tmp_path / "kv-only", [A])
    import_archive(exported(tmp_path / "kv-only", tmp_path / "a.tar"), tmp_path / "copy")
    assert states(tmp_path / "copy") == {A.key: "pending"}


@pytest.mark.parametrize("existing", ["folder", "file", "link"])
def test_nothing_is_overwritten(root: Path, tmp_path: Path, existing: str) -> None:
    file = exported(root, tmp_path / "index.tar")
    before = file.read_bytes()
    with pytest.raises(StoreError, match="exists"):
        exported(root, file)
    assert file.read_bytes() == before
    target = tmp_path / "copy"
    make: dict[str, Callable[[], object]] = {
        "folder": target.mkdir, "file": target.touch, "link": lambda: target.symlink_to(tmp_path / "nowhere")
    }  # fmt: skip
    make[existing]()
    with pytest.raises(StoreError, match="exists"):
        import_archive(file, target)
    assert around(tmp_path) == {"index", "index.tar", "copy"}


class Interrupt(Progress):
    """Ctrl-C after some of the bytes."""

    def __init__(self, after: int) -> None:
        self.left = after

    def advance(self, amount: int = 1) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [0, 1, 4, 6])
def test_interruption_leaves_nothing_half(root: Path, tmp_path: Path, after: int) -> None:
    with pytest.raises(KeyboardInterrupt), closed_index(root) as index:
        export_index(index, tmp_path / "index.tar", progress=Interrupt(after))
    assert around(tmp_path) == {"index"}
    file = exported(root, tmp_path / "index.tar")
    with pytest.raises(KeyboardInterrupt):
        import_archive(file, tmp_path / "copy", progress=Interrupt(after))
    assert around(tmp_path) == {"index", "index.tar"}
    import_archive(file, tmp_path / "copy")
