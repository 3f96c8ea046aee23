"""Stores of measurements are those of the settings. No engine is started here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blendrag.errors import EngineError, StoreError
from blendrag.lab.scratch import scratch_store
from blendrag.serving.identity import prefix_ids
from blendrag.settings import Settings
from blendrag.store.identity import prefix_name

PIECES = [tuple(range(at, at + 20)) for at in (100, 200, 300)]


class Worker:
    """In the engine's place: notes what it is asked for."""

    def __init__(self, model_path: Path) -> None:
        self.model_path, self.max_model_len = model_path, 2048
        self.asked: list[tuple[str, Any]] = []

    def call(self, operation: str, store: str, *args: Any) -> Any:
        self.asked.append((operation, args))
        answers = {"open_store": store, "ingest": {"tokens": 0, "adopted": 0, "seconds": 0.0, "nbytes": 0}}
        return answers.get(operation, {"chunks": 0, "unreachable": []} if operation == "delete" else 0)


@pytest.fixture
def worker(model_dir: Path) -> Any:
    return Worker(model_dir)


@pytest.fixture
def settings(tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr("blendrag.serving.prefill.INGEST_BATCH_TOKENS", 64)
    small: dict[str, Any] = {"cache_dir": tmp_path, "codec": "int8"}
    return Settings.load(model=str(model_dir), **small)


@pytest.mark.parametrize("shared", ["none", "start", "system"])
def test_chunks_are_prefilled_behind_what_served_ones_are(
    settings: Settings, worker: Any, shared: str
) -> None:
    own = settings.model_copy(update={"shared_prefix": shared})
    expected = prefix_ids(own, worker.model_path)
    with scratch_store(worker, own, PIECES) as store:
        (_, (identity, _, prefix, *_)), *rest = worker.asked
        assert prefix == list(expected) and identity["prefix"] == prefix_name(shared, expected)
        assert identity["codec"] == "int8" and identity["namespace"]
        ingested = [args[0] for operation, args in rest if operation == "ingest"]
        assert [key for batch in ingested for key, *_ in batch] == [chunk.key for chunk in store.chunks]
        longest = max(len(batch) for batch in ingested)
        assert longest * 20 <= 64
        behind = [(context, after) for batch in ingested for *_, context, after in batch]
        assert behind == [(list(chunk.context), chunk.after) for chunk in store.chunks] != [([], "")] * 3


def test_store_does_not_outlive_a_measurement_that_fails(
    settings: Settings, worker: Any, tmp_path: Path
) -> None:
    with pytest.raises(EngineError), scratch_store(worker, settings, PIECES) as store:
        assert Path(store.id).is_dir()
        raise EngineError("died")
    assert [operation for operation, _ in worker.asked][-2:] == ["delete", "close_store"]
    assert not Path(store.id).exists() and not list(tmp_path.glob(".blendrag-*"))


def test_folder_that_cannot_be_written_is_a_clear_error(settings: Settings, worker: Any) -> None:
    (settings.cache_dir / "file").write_text("")
    own = settings.model_copy(update={"cache_dir": settings.cache_dir / "file"})
    with pytest.raises(StoreError, match="file"), scratch_store(worker, own, PIECES):
        pass
