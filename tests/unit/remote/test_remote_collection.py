"""A collection of a server's, over real connections."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag import RemoteChat, errors
from blendrag.progress import Progress
from blendrag.remote.collection import _NAME, _as_path
from scripted_server import Reply, Script, error, scripted


@pytest.fixture
def server() -> Iterator[Script]:
    with scripted() as script:
        yield script


BEGUN = {"doing": "x", "done": 0, "total": 1}


def lines(*told: dict[str, object]) -> Reply:
    return Reply(lines=[json.dumps(line) + "\n" for line in told])


class Noting(Progress):
    def __init__(self) -> None:
        self.notes, self.all, self.done = list[str](), 0, 0

    def note(self, what: str) -> None:
        self.notes.append(what)

    def total(self, amount: int) -> None:
        self.all += amount

    def advance(self, amount: int = 1) -> None:
        self.done += amount


def test_progress_or_report_is_lost(server: Script) -> None:
    said = [{"doing": "prefill", "done": n, "total": 8} for n in (0, 3, 8)]
    server.replies = [lines(*said, {"report": {"chunks": 2, "tokens": 8}})]
    noting = Noting()
    kept = RemoteChat(server.url).collection("cities")
    report = kept.add({"a": ["A", "a"]}, sources={"a": "file"}, progress=noting)
    assert (report.chunks, report.tokens) == (2, 8)
    assert (noting.notes, noting.all, noting.done) == (["prefill"] * 3, 8, 8)
    method, path, body = server.asked[0]
    assert (method, path) == ("PUT", "/v1/kb/collections/cities")
    assert body == {"documents": {"a": ["A", "a"]}, "sources": {"a": "file"}}


def test_sync_forgets_nothing(server: Script) -> None:
    server.replies = [lines({"report": {"added": 1, "removed": 2}})]
    assert RemoteChat(server.url).collection("x").sync({"a": ["A"]}).removed == 2
    assert server.asked[0][2]["sync"] is True


def test_collection_without_documents_is_an_error(server: Script) -> None:
    server.replies = [error(404, "no collection 'x'")] * 3
    kept = RemoteChat(server.url).collection("x")
    assert kept.ids() == set()
    kept.remove(["a"])
    kept.clear()


@pytest.mark.parametrize(
    ("reply", "kind", "said"),
    [
        (lines(BEGUN, {"error": "no room", "status": 507}), errors.StoreFullError, "no room"),
        (lines(BEGUN), errors.ServerError, "goes on with these"),
        (Reply(lines=[""], cut=True), errors.ServerError, "broke off"),
        (error(507, "full"), errors.StoreFullError, "full"),
        (error(413), errors.ServerRefusalError, "less at once"),
        (error(404), errors.ServerNotFoundError, "no server of blendrag"),
        (error(403, "not yours"), errors.ServerRefusalError, "not yours"),
    ],
)
def test_failure_of_an_ingest_passes_for_its_end(
    server: Script, reply: Reply, kind: type[Exception], said: str
) -> None:
    server.replies = [reply]
    with pytest.raises(kind, match=said):
        RemoteChat(server.url).collection("x").add({"a": ["A"]})


@given(st.text(min_size=1), st.text(min_size=1))
def test_names_share_a_collection_or_are_refused(one: str, other: str) -> None:
    assert _NAME.fullmatch(_as_path(one))
    assert (_as_path(one) == _as_path(other)) == (one == other)
