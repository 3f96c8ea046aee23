"""Prefills: what is told of one while it runs, and two who sync a collection at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blendrag.errors import EngineClosedError, EngineError
from blendrag.serving.collection import Collection
from blendrag.serving.library import Library
from blendrag.serving.prefill import PrefillReport, prefill_pending
from blendrag.settings import Settings
from noted import Noted


class Store:
    def ingest(self, batch: list[Any]) -> Any:
        return SimpleNamespace(tokens=sum(len(one.token_ids) for one in batch), seconds=1.0, nbytes=1)

    def flush(self) -> int:
        return 0


def test_progress_is_told_with_each_batch() -> None:
    entries: Any = [SimpleNamespace(token_ids=(1, 2, 3)), SimpleNamespace(token_ids=(4, 5))]
    store: Any = Store()
    noting = Noted()
    prefill_pending(entries, store, 3, PrefillReport(), noting)
    assert noting.at == [3, 5]


class Shared(Store):
    """Whose shared tier has all of it."""

    def ingest(self, batch: list[Any]) -> Any:
        return SimpleNamespace(tokens=0, seconds=0.0, nbytes=0)


def test_what_another_engine_has_prefilled_is_done_too() -> None:
    store: Any = Shared()
    noting = Noted()
    prefill_pending(ENTRIES, store, 3, PrefillReport(), noting)
    assert noting.done == 5


class Broken(Store):
    """Whose engine has died."""

    def ingest(self, batch: list[Any]) -> Any:
        raise EngineError("it died at ingest")

    def flush(self) -> int:
        raise EngineError("it died at flush")


ENTRIES: Any = [SimpleNamespace(token_ids=(1, 2, 3)), SimpleNamespace(token_ids=(4, 5))]


def test_first_error_of_an_engine_that_died_is_the_one_that_is_told() -> None:
    store: Any = Broken()
    with pytest.raises(EngineError, match="at ingest"):
        prefill_pending(ENTRIES, store, 3, PrefillReport(), Noted())


def test_prefill_that_is_stopped_ends_behind_what_was_begun() -> None:
    store: Any = Store()
    report, noting = PrefillReport(), Noted()

    def go_on() -> None:
        if noting.done:
            raise EngineClosedError("the server is about to end")

    with pytest.raises(EngineClosedError):
        prefill_pending(ENTRIES, store, 3, report, noting, go_on)
    assert (report.chunks, noting.done) == (1, 3)


# -- two who sync a collection at once, as two API servers do -------------------------------------------

SETTINGS = Settings.load(max_model_len=512)
ROUNDS = 200
DOCUMENTS = 6


def unblended(*_: Any) -> Any:
    """An engine whose model keeps no KV: what is registered stays as it is."""
    facts = SimpleNamespace(reason="it is a stand-in")
    return SimpleNamespace(alive=True, blends=False, facts=facts, release=lambda: None)


def test_two_syncs_at_once_end_as_one_of_the_two(tmp_path: Path, model_dir: Path) -> None:
    servers = [Library(tmp_path / "kv", SETTINGS, unblended, shared=True) for _ in range(2)]
    together = threading.Barrier(2)

    def sync(who: int, number: int) -> set[str]:
        # Some ids are in both, with other texts: a mixture would show in the texts, too.
        wanted = {f"{number}-{n if n % 2 else (n, who)}": [f"Text {n} of {who}."] for n in range(DOCUMENTS)}
        together.wait(60)
        Collection(servers[who], "cities").sync(wanted)
        return {f"{id}: {text}" for id, (text,) in wanted.items()}

    try:
        with ThreadPoolExecutor(2) as pool:
            for number in range(ROUNDS):
                wanted = list(pool.map(sync, (0, 1), (number, number)))
                kept = Collection(servers[0], "cities")
                texts = servers[0].catalogue.texts_of
                found = {f"{id}: {text}" for id in kept.ids() for text in texts(kept._owner(id))}
                assert found in wanted, f"round {number}"
    finally:
        for server in servers:
            server.close()
