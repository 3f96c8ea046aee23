"""Stores of every kind that runs here, scrolled through by their own clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from blendrag import RemoteChat
from blendrag.errors import ConfigError
from blendrag.vectorstores import sync, text_of
from keeping_server import Keeping
from vector_stores import COLLECTION, KINDS, Running, milvus

ROWS = {f"row-{n}": f"Text {n}." for n in range(600)}  # of more than two pages


@pytest.fixture(scope="module", params=KINDS)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with ExitStack() as stack:
        yield KINDS[request.param](tmp_path_factory.mktemp(request.param), stack)


@pytest.fixture
def store(running: Running) -> Iterator[Running]:
    running.put(ROWS)
    yield running
    running.delete({*ROWS, "new"})


def texts(store: Running) -> list[str | None]:
    return [text_of(fields) for page in store.store.pages() for _, fields in page]


def test_every_row_comes_once_with_its_text(store: Running) -> None:
    assert sorted(map(str, texts(store))) == sorted(ROWS.values())
    ids = [id for page in store.store.pages() for id, _ in page]
    assert len(set(ids)) == len(ROWS)
    assert store.store.count() == len(ROWS)


def test_row_that_stays_is_not_missed_while_others_are_deleted(store: Running) -> None:
    pages = store.store.pages()
    seen = [text_of(fields) for _, fields in next(pages)]
    gone = list(ROWS)[::2]
    store.delete(gone)
    seen += [text_of(fields) for page in pages for _, fields in page]
    assert {ROWS[id] for id in ROWS.keys() - set(gone)} <= set(seen)


def test_server_is_told_what_changed_and_no_more(store: Running, server: Keeping) -> None:
    kept = RemoteChat(server.url).collection("handbook")
    report = sync(store.store, kept, progress=False)
    assert (report.added, report.removed, report.unchanged) == (600, 0, 0)
    assert server.texts == sorted(ROWS.values())
    before = len(server.puts)
    store.put({"new": "New.", "row-1": "Another."})
    store.delete(["row-2", "row-3"])
    report = sync(store.store, kept, progress=False)
    assert (report.added, report.changed, report.removed, report.unchanged) == (1, 1, 2, 597)
    assert sum(map(len, server.puts[before:])) == 2
    assert server.texts == sorted({*ROWS.values(), "New.", "Another."} - {"Text 1.", "Text 2.", "Text 3."})


def test_wrong_name_is_told_with_the_one_that_may_be_meant(store: Running, server: Keeping) -> None:
    wrong = type(store.store)(store.store.client, "hanbook")
    server.documents = {"kept": ["Kept."]}
    with pytest.raises(ConfigError, match=f"no such collection; did you mean {COLLECTION}?"):
        sync(wrong, RemoteChat(server.url).collection("x"), progress=False)
    assert server.texts == ["Kept."]


def test_url_leads_to_the_store(store: Running, server: Keeping) -> None:
    if store.url is None:
        pytest.skip("this store is a library here, so no server can be away")
    assert sync(store.url, RemoteChat(server.url).collection("x"), progress=False).added == len(ROWS)


def test_text_may_be_in_a_field_of_no_schema(tmp_path: Path, server: Keeping) -> None:
    with ExitStack() as stack:
        store = milvus(tmp_path, stack).store
        row = {"id": "one", "vector": [1.0, 0.5], "prose": "Of a field of one's own."}
        store.client.upsert(COLLECTION, [row])
        sync(store, RemoteChat(server.url).collection("x"), text_field="prose", progress=False)
    assert server.texts == [row["prose"]]
