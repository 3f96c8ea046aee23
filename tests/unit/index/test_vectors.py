from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from blendrag.embedder import Embedder
from blendrag.errors import (
    EngineClosedError,
    EngineError,
    ModelNotFoundError,
    StoreError,
    StoreFullError,
    StoreMismatchError,
)
from blendrag.files import hnsw
from blendrag.index.vectors import VectorStore

if TYPE_CHECKING:  # a process of its own reads this file without the helpers
    from mounts import Mount


class Compass:
    """An embedder for tests of the store alone: a text is a number, its vector points that many degrees."""

    name = "compass"

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        return [[math.cos(math.radians(float(text))), math.sin(math.radians(float(text)))] for text in texts]


def elsewhere(code: str, root: Path) -> str:
    """What a process of its own prints that does this with the store of a folder."""
    begin = "import sys; from pathlib import Path; from test_vectors import Compass, VectorStore\n"
    begin += "store = VectorStore(Path(sys.argv[1]), Compass())\n"
    command = [sys.executable, "-c", begin + code, str(root)]
    here = Path(__file__).parent
    return subprocess.run(
        command, check=True, cwd=here, timeout=120, stdout=subprocess.PIPE, text=True
    ).stdout


@pytest.fixture
def store(tmp_path: Path) -> VectorStore:
    return VectorStore(tmp_path, Compass())


def test_vectors_of_the_real_model_are_normalised_and_quiet(
    embedder: Embedder, capfd: pytest.CaptureFixture[str]
) -> None:
    vectors = embedder.embed(["Who approves travel?", "The team lead approves trips.", "Bread needs yeast."])
    assert capfd.readouterr() == ("", "")
    assert [math.hypot(*vector) for vector in vectors] == pytest.approx([1.0] * 3, abs=1e-4)
    assert embedder.embed([]) == []


def test_question_finds_its_answer_with_the_real_model(embedder: Embedder, tmp_path: Path) -> None:
    store = VectorStore(tmp_path, embedder)
    store.put("travel", [("t", "The team lead approves trips.")])
    store.put("baking", [("b", "Bread needs yeast, flour and patience.")])
    hits = store.search("Who approves travel?", 2)
    assert [hit.source for hit in hits] == ["travel", "baking"]
    assert 1 >= hits[0].score > hits[1].score


def test_missing_embedding_model_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        Embedder(tmp_path / "nothing").embed(["text"])


def test_purge_overwrites_what_hnswlib_wrote_of_memory_that_it_had_not_set(
    store: VectorStore, tmp_path: Path
) -> None:
    store.put("a", [("a", "10")])
    (data,) = tmp_path.rglob("data_level0.bin")
    room = data.stat().st_size
    data.write_bytes(b"secret".ljust(room, b"."))
    store.purge("a")
    assert data.read_bytes() == bytes(room)


def test_purge_leaves_the_vectors_of_other_documents(store: VectorStore, tmp_path: Path) -> None:
    """Chroma writes its file of vectors after a thousand of them."""
    store.put("b", [(f"b{n}", str(n / 10)) for n in range(1100)])
    store.put("a", [("a", "200")])
    (data,) = tmp_path.rglob("data_level0.bin")
    before = data.read_bytes()
    data.write_bytes(before + b"secret")
    store.purge("a")
    assert any(before) and data.read_bytes() == before + bytes(6)


def test_shorter_version_leaves_no_rows_of_the_longer_one(store: VectorStore) -> None:
    store.put("a", [("k0", "0"), ("k1", "10"), ("k2", "20")])
    store.put("a", [("k3", "30")])
    assert len(store.rows()) == 1
    assert [hit.key for hit in store.search("0", 5)] == ["k3"]


def test_deleting_a_source_spares_its_twin(store: VectorStore) -> None:
    store.put("a", [("k", "0")])
    store.put("b", [("k", "0")])
    store.delete("a")
    store.delete("never there")
    assert {row.source for row in store.rows()} == {"b"}
    assert [hit.source for hit in store.search("0", 5)] == ["b"]


def test_copies_of_a_chunk_do_not_crowd_out_others(store: VectorStore) -> None:
    for number in range(50):
        store.put(f"copy{number}", [("same", "0")])
    store.put("other", [("k1", "10"), ("k2", "20")])
    assert [hit.key for hit in store.search("1", 3)] == ["same", "k1", "k2"]


def test_repeated_chunk_within_a_document_is_stored_at_each_place(store: VectorStore) -> None:
    store.put("a", [("k", "0"), ("k", "0")])
    assert len(store.rows()) == 2
    assert len(store.search("0", 2)) == 1


def test_more_pieces_than_one_batch_holds_are_all_stored(store: VectorStore) -> None:
    size = store._client.get_max_batch_size() + 1
    store.put("a", [(f"k{n}", str(n % 90)) for n in range(size)])
    assert len(store.rows()) == size
    assert len(store.search("3", 200)) == 200
    store.delete("a")
    assert len(store.rows()) == 0


def test_rows_survive_closing(tmp_path: Path) -> None:
    VectorStore(tmp_path, Compass()).put("a", [("k", "5")], {"page": 3, "tags": ["x"], "none": None})
    answer = elsewhere("print(store.search('5', 1))", tmp_path)
    assert "source='a', ordinal=0, score=1.0, text='5', key='k'" in answer
    assert "metadata={'page': 3, 'tags': ['x'], 'none': None}" in answer


@pytest.mark.parametrize(
    "name", ["", "#", "#document", "chroma:document", "\ud800", "source", "chunk_key", "ordinal"]
)
def test_metadata_of_any_name_and_value_comes_back(store: VectorStore, name: str) -> None:
    given = {name: "x", "year": 2024, "tags": [{"a": "\ud800"}], "none": None}
    store.put("a", [("k", "0")], given)
    (hit,) = store.search("0", 1)
    assert (hit.source, hit.key, hit.ordinal, hit.metadata) == ("a", "k", 0, given)


def test_metadata_that_a_document_has_no_more_is_gone(store: VectorStore) -> None:
    store.put("a", [("k", "0")], {"draft": True, "year": 2024})
    store.put("a", [("k", "0")], {"year": 2025})
    assert [hit.metadata for hit in store.rows()] == [{"year": 2025}]


def test_empty_store_and_k_of_zero_answer_nothing(store: VectorStore) -> None:
    assert store.search("0", 3) == []
    store.put("a", [])
    store.put("b", [("k", "0")])
    assert store.search("0", 0) == []


def test_another_embedder_is_refused_by_name(tmp_path: Path) -> None:
    VectorStore(tmp_path, Compass()).put("a", [("k", "0")])
    other = Compass()
    other.name = "sextant"
    with pytest.raises(StoreMismatchError, match=r"'compass'.*'sextant'"):
        VectorStore(tmp_path, other)
    assert len(VectorStore(tmp_path, Compass()).rows()) == 1


def test_file_in_the_stores_place_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "chroma").write_text("not a folder")
    with pytest.raises(StoreError):
        VectorStore(tmp_path, Compass())


def test_folder_that_was_removed_can_be_begun_anew_in_the_same_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after an attempt to open it that failed."""
    pytest.importorskip("chromadb", "1.5")  # earlier ones cannot be closed
    for at in ("10", "20"):
        store = VectorStore(tmp_path, Compass())
        store.put("a", [("a", at)])
        assert [hit.text for hit in store.search("0", 3)] == [at]
        store.close()
        store.close()
        shutil.rmtree(tmp_path / "chroma")
        with monkeypatch.context() as patch, pytest.raises(StoreError, match="no such configuration"):
            refused = Mock(side_effect=ValueError("no such configuration"))
            patch.setattr("chromadb.api.client.Client.get_or_create_collection", refused)
            VectorStore(tmp_path, Compass())
        shutil.rmtree(tmp_path / "chroma")


def test_closed_store_says_so(store: VectorStore) -> None:
    store.put("a", [("a", "10")])
    store.close()
    for fails in (
        lambda: store.search("0", 3),
        lambda: store.put("a", [("a", "10")]),
        lambda: store.delete("a"),
        store.rows,
    ):
        with pytest.raises(EngineClosedError, match="was closed: open it again"):
            fails()


def test_fork_of_its_process_is_told_so_and_does_not_wait(store: VectorStore) -> None:
    store.put("a", [("a", "10")])
    if not (child := os.fork()):
        signal.alarm(20)  # ends it, and not with 0
        told = False
        try:
            store.search("0", 3)
        except EngineError as error:
            told = "not to its fork" in str(error)
            with closing(VectorStore(store._folder.parent, Compass())) as opened:  # after forking
                told &= len(opened.search("0", 3)) == 1
        finally:
            store.close()
            os._exit(not told)
    assert os.waitpid(child, 0)[1] == 0
    assert len(store.search("0", 3)) == 1


def test_fork_that_ends_does_not_wait_either(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "if not (child := os.fork()):\n"
        "    signal.alarm(20)\n"
        "    sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0"
    )
    elsewhere(code, tmp_path)


def test_store_stays_open_where_another_of_its_folder_cannot_be_opened(
    store: VectorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", [("a", "10")])
    with monkeypatch.context() as patch:
        patch.setattr("chromadb.api.client.Client.get_or_create_collection", Mock(side_effect=ValueError))
        with pytest.raises(StoreError):
            VectorStore(store._folder.parent, Compass())
    with closing(VectorStore(store._folder.parent, Compass())) as other:
        assert other._client._server is store._client._server


def test_sources_that_have_lost_rows_are_named(store: VectorStore) -> None:
    store.put("a", [("k0", "0"), ("k1", "10")])
    store.put("b", [("k1", "10")])
    assert store.incomplete({"a": 2, "b": 1}) == set()
    assert store.incomplete({"a": 3, "b": 1, "c": 0, "d": 1}) == {"a", "d"}


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ("*.bin", None),
        ("*.pickle", None),
        ("header.bin", 50),
        ("data_level0.bin", 0),
        ("data_level0.bin", 9000),
    ],
)
def test_lost_files_of_vectors_are_an_error_that_says_what_to_do(
    files: str, left: int | None, tmp_path: Path
) -> None:
    """Chroma would end the process, or find no more than the latest texts."""
    pieces = [(f"k{number}", str(number % 90)) for number in range(1100)]
    with closing(VectorStore(tmp_path, Compass())) as store:
        store.put("a", pieces)
    for path in tmp_path.glob(f"chroma/*/{files}"):
        path.unlink() if left is None else os.truncate(path, left)
    with pytest.raises(StoreError, match=r"lost or cut off in .* ingest again"):
        VectorStore(tmp_path, Compass())
    shutil.rmtree(tmp_path / "chroma")
    with closing(VectorStore(tmp_path, Compass())) as store:
        store.put("a", pieces)
        assert len(store.search("0", 3)) == 3


@pytest.mark.parametrize("left", [0, 100])
def test_what_a_kill_left_of_the_first_files_of_vectors_is_made_anew(left: int, tmp_path: Path) -> None:
    """Chroma has all in its log until it has noted that they are written."""
    with closing(VectorStore(tmp_path, Compass())) as store:
        store.put("a", [(f"k{number}", str(number)) for number in range(90)])
    (header,) = tmp_path.glob("chroma/*/header.bin")
    header.write_bytes(hnsw._HEADER.pack(1, 0, 1024, 1000, 172).ljust(100)[:left])
    with closing(VectorStore(tmp_path, Compass())) as store:
        assert store.purge("b") == 0
        assert len(store.search("0", 90)) == 90


def test_broken_file_is_a_store_error_each_time(tmp_path: Path) -> None:
    (tmp_path / "chroma").mkdir()
    (tmp_path / "chroma" / "chroma.sqlite3").write_bytes(b"no database" * 1000)
    for _ in range(2):
        with pytest.raises(StoreError, match="not a database; if its files are damaged, remove"):
            VectorStore(tmp_path, Compass())
    shutil.rmtree(tmp_path / "chroma")
    with closing(VectorStore(tmp_path, Compass())) as store:
        store.put("a", [("a", "10")])


def test_store_that_cannot_be_written_is_an_error_of_ours(store: VectorStore) -> None:
    store._client.delete_collection("chunks")
    for fails in (lambda: store.put("a", [("a", "10")]), lambda: store.delete("a")):
        with pytest.raises(StoreError, match="the vector store failed"):
            fails()


def test_full_disk_is_said(tmp_path: Path, mount: Mount) -> None:
    mount(tmp_path / "disk", size="2m")
    store = VectorStore(tmp_path / "disk", Compass())
    with pytest.raises(StoreFullError, match="the vector store failed"):
        store.put("a", [("a", "1" * 300)] * 5000)
    store.close()
