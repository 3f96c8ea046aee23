"""Ingest and ask on real parts: vectors, catalogue, KV and answers agree whatever happens in between."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blendrag import BlendIndex, Document
from blendrag.errors import EmptyIndexError, StoreFullError, StoreInUseError, StoreMismatchError
from blendrag.progress import Progress
from places import ROOT
from workbench import assert_adds_up, assert_consistent, files

pytestmark = pytest.mark.engine

QUESTION = "What is the package for?"
Open = Callable[..., BlendIndex]


# -- ingest -----------------------------------------------------------------------------------------------


def test_a_second_ingest_does_only_what_has_changed(open_index: Open, folder: Path, texts: list[str]) -> None:
    index = open_index()
    first = index.ingest(folder)
    assert (first.added, first.unchanged, first.skipped) == (5, 0, [])
    assert first.chunks == index.stats()["chunks"]["ready"] >= 10
    kv = index._library.identity
    per_token = 4 * 2 * kv.num_layers * kv.num_kv_heads * kv.head_size  # float32, K and V
    on_disk = sum(path.stat().st_size for path in index.root.glob("kv/??/*"))
    assert first.nbytes == index.stats()["chunks"]["bytes"] == on_disk > first.tokens * per_token
    assert_consistent(index)
    before = files(index)

    again = index.ingest(folder)
    assert (again.added, again.changed, again.unchanged, again.chunks) == (0, 0, 5, 0)
    assert files(index) == before

    (folder / "1.txt").write_text(texts[5])
    (folder / "2.txt").unlink()
    index._ledger._execute("UPDATE documents SET reader = 0")  # as if an older reader had made another text
    changed = index.ingest(folder)
    assert (changed.added, changed.changed, changed.unchanged, changed.removed) == (0, 1, 3, 1)
    assert changed.reread == 1 and not index._ledger.read_by_older()
    assert 0 < changed.chunks <= 4
    assert_consistent(index)
    assert not {str(folder / "2.txt")} & {row.source for row in index._vectors.rows()}
    assert before - files(index), "the KV of what is gone is gone"


def test_a_chunk_of_two_documents_outlives_one_of_them(open_index: Open, texts: list[str]) -> None:
    index = open_index()
    index.ingest([Document(texts[0], "one"), Document(texts[0], "two")])
    before = files(index)
    index.delete("one")
    assert files(index) == before
    index.delete("two")
    assert files(index) == set()
    assert_consistent(index)


def test_deleting_while_no_engine_runs_removes_the_kv_when_it_does(
    open_index: Open, texts: list[str]
) -> None:
    with open_index() as index:
        index.ingest([Document(texts[0], "one"), Document(texts[1], "two")])
        before = files(index)
    with open_index() as index:
        index.delete("one")
        index.ask(QUESTION)
        assert files(index) < before
        assert_consistent(index)


def test_an_interrupted_ingest_resumes_with_what_is_left(
    open_index: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blendrag.serving.prefill.INGEST_BATCH_TOKENS", 128)
    index = open_index()

    passed = []

    def interrupt(self: Progress, tokens: int) -> None:
        passed.append(tokens)
        if sum(passed) > 256:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Progress, "advance", interrupt)
        index.ingest(folder)
    left = len(index._library.catalogue.pending())
    assert left and files(index)
    assert_consistent(index)
    assert index.ask(QUESTION).text  # what is there can be asked already
    index.close()

    index = open_index()
    resumed = index.ingest(folder)
    assert (resumed.unchanged, resumed.chunks) == (5, left)
    assert index._library.catalogue.pending() == []
    assert_consistent(index)


def test_an_ingest_interrupted_between_documents_takes_the_rest_later(
    open_index: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, seen = open_index(), []

    def interrupt(self: Progress, what: str) -> None:
        seen.append(what)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Progress, "note", interrupt)
        index.ingest(folder)
    resumed = index.ingest(folder)
    assert (resumed.unchanged, resumed.added) == (2, 3)
    assert index._library.catalogue.pending() == []
    assert_consistent(index)


def test_over_the_disk_limit_chunks_leave_and_questions_are_still_answered(
    open_index: Open, folder: Path
) -> None:
    limit = 6 << 20
    index = open_index(tiers=[{"kind": "ram"}, {"kind": "disk", "bytes": limit}])
    index.ingest(folder)
    chunks = index.stats()["chunks"]
    assert chunks["evicted"] > 0 and chunks["pending"] == 0 and chunks["ready"] > 0
    assert sum(path.stat().st_size for path in index.root.glob("kv/*/*")) <= limit
    answer = index.ask(QUESTION, similarity_top_k=10)
    assert_adds_up(answer)
    rows = index.explain(QUESTION, similarity_top_k=10)
    assert any("not stored" in row["reason"] for row in rows if row["source"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A file system of its own, of as many MiB as are asked for; asked again, it grows."""
    path = tmp_path / "disk"
    path.mkdir()

    def size(mib: int) -> Path:
        again = "remount," if os.path.ismount(path) else ""
        command = ["mount", "-t", "tmpfs", "-o", f"{again}size={mib}m", "none", str(path)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting is not allowed here")
        return path

    yield size
    if os.path.ismount(path):
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_stops_ingest_cleanly_and_the_rest_comes_later(
    open_index: Open, folder: Path, small_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blendrag.serving.prefill.INGEST_BATCH_TOKENS", 128)
    root = small_disk(8) / "kb"
    index = open_index(str(root))
    with pytest.raises(StoreFullError, match="ingest again"):
        index.ingest(folder)
    left = len(index._library.catalogue.pending())
    assert left and files(index)
    assert not list(root.glob("kv/*/*.tmp"))
    assert_consistent(index)

    small_disk(200)
    resumed = index.ingest(folder)
    assert (resumed.unchanged, resumed.chunks) == (5, left)
    assert index._library.catalogue.pending() == []
    assert_consistent(index)


# -- opening ----------------------------------------------------------------------------------------------


def test_an_index_made_with_another_model_is_refused_by_both_names(
    open_index: Open, texts: list[str], model_dir: Path, tmp_path: Path
) -> None:
    with open_index() as index:
        index.ingest(Document(texts[0], "one"))
    other = tmp_path / "other-model"
    other.mkdir()
    for file in model_dir.iterdir():
        (other / file.name).symlink_to(file)
    config = (model_dir / "config.json").read_text()
    (other / "config.json").unlink()
    (other / "config.json").write_text(config.replace('"rms_norm_eps"', '"note": 1, "rms_norm_eps"'))
    with pytest.raises(StoreMismatchError, match=r"smollm2-10-layers.*other-model"):
        open_index(model=str(other))
    with open_index() as index:  # the refusal left no lock and no change
        assert index.ask(QUESTION).text


def test_an_index_open_in_another_process_is_refused_by_its_number(
    open_index: Open, texts: list[str], engine_options: dict[str, Any]
) -> None:
    index = open_index()
    index.ingest(Document(texts[0], "one"))
    script = f"from blendrag import BlendIndex; BlendIndex.open({str(index.root)!r}, **{engine_options!r})"
    other = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert StoreInUseError.__name__ in other.stderr
    assert f"process {os.getpid()}" in other.stderr
    assert index.ask(QUESTION).text


def test_an_empty_index_says_so(open_index: Open) -> None:
    index = open_index()
    with pytest.raises(EmptyIndexError, match="ingest some first"):
        index.ask(QUESTION)
