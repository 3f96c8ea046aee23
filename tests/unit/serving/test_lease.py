"""One library per configuration, however many wrappers there are. No engine is started here."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blendrag.errors import EngineBusyError, ModelNotFoundError, StoreInUseError, StoreMismatchError
from blendrag.files.lock import IndexLock
from blendrag.serving import owners
from blendrag.serving.lease import Lease, default_kv_dir
from blendrag.serving.owners import owner_of, volatile
from blendrag.settings import Settings

SMALL, LARGE = Settings.load(max_model_len=512), Settings.load(max_model_len=1024)


@pytest.fixture(autouse=True)
def nothing_stays_open(model_dir: Path) -> Iterator[None]:
    yield
    gc.collect()
    for library in list(Lease._open.values()):
        library.close()
    Lease._open.clear()
    Lease._claims.clear()


def open_elsewhere(folder: Path) -> bool:
    try:
        IndexLock(folder).release()
    except StoreInUseError:
        return True
    return False


@pytest.mark.parametrize(
    "made", [lambda _: Lease(), copy.deepcopy, lambda lease: pickle.loads(pickle.dumps(lease))]
)
def test_wrapper_that_is_made_again_or_copied_opens_its_folder_once(made: Any, tmp_path: Path) -> None:
    """Nor do settings of single requests ask for another engine."""
    lease = Lease()
    library = lease.library(SMALL, tmp_path)
    of_requests = SMALL.model_copy(update={"recompute_ratio": 0.5, "selector": "first_k", "blend": False})
    assert made(lease).library(of_requests, tmp_path) is library


def test_wrapper_that_was_dropped_makes_room_for_another_configuration(tmp_path: Path) -> None:
    dropped = Lease()
    dropped.library(SMALL, tmp_path / "a")
    del dropped
    gc.collect()
    assert open_elsewhere(tmp_path / "a"), "it stays open until it is in the way"
    kept = Lease()
    kept.library(LARGE, tmp_path / "b")
    assert not open_elsewhere(tmp_path / "a")
    assert open_elsewhere(tmp_path / "b")


def test_wrapper_in_use_keeps_its_library_until_it_changes_its_own_configuration(tmp_path: Path) -> None:
    one, other = Lease(), Lease()
    library = one.library(SMALL, tmp_path / "a")
    with pytest.raises(EngineBusyError, match=r"max_model_len=512.* max_model_len=1024"):
        other.library(LARGE, tmp_path / "a")
    other.library(LARGE, tmp_path / "b")
    assert one.library(SMALL, tmp_path / "a") is library
    one.library(LARGE, tmp_path / "b")
    assert not open_elsewhere(tmp_path / "a")


def test_closed_wrapper_gives_up_its_folder_and_can_be_used_again(tmp_path: Path) -> None:
    lease = Lease()
    lease.library(SMALL, tmp_path)
    for _ in range(2):
        lease.close()
        assert not open_elsewhere(tmp_path)
    lease.library(SMALL, tmp_path)
    assert open_elsewhere(tmp_path)


def test_documents_of_stores_that_ended_with_their_process_are_removed(tmp_path: Path) -> None:
    lease = Lease()
    library = lease.library(SMALL, tmp_path)
    other = volatile("a").replace(owners._PROCESS, "1")
    names = {other: "gone", volatile("a"): "ours", "chroma": "stays"}
    library.texts.register({owner_of(name, "x"): [text] for name, text in names.items()})
    lease.close()
    texts = [entry.text for entry in lease.library(SMALL, tmp_path).catalogue.entries()]
    assert texts == ["ours", "stays"]


def test_folder_open_in_another_process_is_a_clear_error(tmp_path: Path) -> None:
    lock = IndexLock(tmp_path)
    with pytest.raises(StoreInUseError, match="process"):
        Lease().library(SMALL, tmp_path)
    lock.release()


def test_wrong_model_leaves_no_folder_behind(tmp_path: Path) -> None:
    wrong = Settings.load(model=str(tmp_path / "modle"))
    with pytest.raises(ModelNotFoundError, match="modle"):
        Lease().library(wrong, tmp_path / "kv")
    assert not (tmp_path / "kv").exists()


def test_default_folder_is_shared_only_where_the_kv_is_the_same() -> None:
    """Only a prompt that the texts stand behind is a part of their KV."""
    assert default_kv_dir(SMALL) == default_kv_dir(LARGE)
    assert default_kv_dir(SMALL.model_copy(update={"system_prompt": "Be kind."})) == default_kv_dir(SMALL)
    others: list[dict[str, str]] = [
        {}, {"dtype": "float32"}, {"namespace": "a"}, {"namespace": "b"}, {"codec": "int8"},
        {"shared_prefix": "system", "system_prompt": "Be brief."},
        {"shared_prefix": "system", "system_prompt": "Be kind."},
    ]  # fmt: skip
    assert len({default_kv_dir(SMALL.model_copy(update=other)) for other in others}) == len(others)


def test_namespace_is_not_served_from_the_open_folder_of_another(tmp_path: Path) -> None:
    ours, theirs = (SMALL.model_copy(update={"namespace": name}) for name in ("a", "b"))
    lease = Lease()
    library = lease.library(ours, tmp_path)
    library.texts.register({"document": ["Our secret."]})
    with pytest.raises(StoreMismatchError, match="namespace='a', not namespace='b'"):
        Lease().library(theirs, tmp_path)
    lease.close()
    with pytest.raises(StoreMismatchError, match="namespace"):
        Lease().library(theirs, tmp_path)
    assert Lease().library(theirs, tmp_path / "b").plan("Our secret.").cached_tokens == 0


def test_folder_that_is_open_with_another_prefix_is_not_lent_for_this_one(tmp_path: Path) -> None:
    behind = SMALL.model_copy(update={"shared_prefix": "system"})
    lease = Lease()
    lease.library(SMALL, tmp_path)
    with pytest.raises(StoreMismatchError, match="shared_prefix='start', not shared_prefix='system'"):
        Lease().library(behind, tmp_path)
    assert lease.library(SMALL.model_copy(update={"system_prompt": "Be brief."}), tmp_path)
    other = tmp_path / "behind"
    lease.library(behind, other)
    with pytest.raises(StoreMismatchError, match=r"open with separator=.*, not separator=' ':"):
        Lease().library(behind.model_copy(update={"separator": " "}), other)
    lease.close()
