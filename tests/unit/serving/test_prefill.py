"""Prefills: what is told of one while it runs, and two who sync a collection at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.errors import EngineClosedError, EngineError
from blendrag.serving.collection import Collection
from blendrag.serving.library import Library
from blendrag.serving.prefill import PrefillReport, grouped, prefill_pending
from blendrag.serving.session import EngineSession
from blendrag.serving.sidecars import Sidecars
from blendrag.settings import Settings
from noted import Noted

ENTRIES: Any = [SimpleNamespace(token_ids=range(length)) for length in (300, 400)]  # of more than one batch
DONE = SimpleNamespace(tokens=0, seconds=0.0, nbytes=0)  # a shared tier has all of it


@pytest.fixture
def store() -> Any:
    return Mock(ingest=Mock(return_value=DONE), flush=Mock(return_value=0))


def test_progress_is_told_with_each_batch_whoever_has_prefilled_it(store: Any) -> None:
    noting = Noted()
    prefill_pending(ENTRIES, store, PrefillReport(), noting)
    assert noting.at == [300, 700]


def test_first_error_of_an_engine_that_died_is_the_one_that_is_told(store: Any) -> None:
    store.ingest.side_effect, store.flush.side_effect = EngineError("at ingest"), EngineError("at flush")
    with pytest.raises(EngineError, match="at ingest"):
        prefill_pending(ENTRIES, store, PrefillReport(), Noted())
    assert store.flush.called


def test_prefill_that_is_stopped_ends_behind_what_was_begun(store: Any) -> None:
    report, noting = PrefillReport(), Noted()

    def go_on() -> None:
        if noting.done:
            raise EngineClosedError("the server is about to end")

    with pytest.raises(EngineClosedError):
        prefill_pending(ENTRIES, store, report, noting, go_on)
    assert (report.chunks, noting.done) == (1, 300)


@given(st.lists(st.integers(0, 9)), st.integers(1, 12))
def test_groups_are_as_large_as_they_may_be(sizes: list[int], most: int) -> None:
    groups = list(grouped(sizes, lambda size: size, most))
    assert [size for group in groups for size in group] == sizes
    assert all(len(group) == 1 or (len(group) > 0 and sum(group) <= most) for group in groups)
    assert all(sum(one) + other[0] > most for one, other in pairwise(groups))


def test_report_counts_texts_that_are_too_long_of_its_own_collection(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SimpleNamespace(max_model_len=20, facts=SimpleNamespace(reason=None))
    monkeypatch.setattr(Sidecars, "start", lambda *_: engine)
    monkeypatch.setattr(
        EngineSession, "open", lambda *_: Mock(ingest=Mock(return_value=DONE), flush=lambda: 0)
    )
    library = Library(tmp_path / "kv", Settings.load(max_model_len=512))
    long = "It has many streets, and a river. " * 9
    try:
        cities, lakes = Collection(library, "cities"), Collection(library, "lakes")
        assert cities.add({"a": f"Of a. {long}", "b": f"Of b. {long}", "c": "Of c."}).too_long == 2
        assert lakes.add({"a": f"Of a lake. {long}"}).too_long == 1
        assert lakes.add({"b": "Of b."}).too_long == 1, "earlier ones again"
    finally:
        library.close()


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
