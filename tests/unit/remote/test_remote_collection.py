"""A collection of a server's, over real connections."""

from __future__ import annotations

import json
import os
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from blendrag import RemoteChat, errors
from blendrag.remote import collection
from blendrag.remote.collection import _NAME, _as_path
from blendrag.serving import owners
from blendrag.serving.collection import NO_COLLECTION
from noted import Noted
from scripted_server import Reply, Script, error

BEGUN = {"doing": "x", "done": 0, "total": 1}


def lines(*told: dict[str, object]) -> Reply:
    return Reply(lines=[json.dumps(line) + "\n" for line in told])


def test_progress_and_report_arrive(server: Script) -> None:
    said = [{"doing": "prefill", "done": n, "total": 8} for n in (0, 3, 8)]
    server.replies = [lines(*said, {"report": {"chunks": 2, "tokens": 8, "of_a_newer_server": 1}})]
    server.replies[0].lines[1:1] = ["\n", " \r\n"]  # which say nothing
    noting = Noted()
    kept = RemoteChat(server.url).collection("cities")
    report = kept.add({"a": ["A", "a"]}, sources={"a": "file"}, progress=noting)
    assert (report.chunks, report.tokens) == (2, 8)
    assert (noting.notes, noting.expected, noting.done) == (["prefill"] * 3, 8, 8)
    method, path, body = server.asked[0]
    assert (method, path) == ("PUT", "/v1/kb/collections/cities")
    assert body == {"documents": {"a": ["A", "a"]}, "sources": {"a": "file"}}


def test_sync_is_one_change_for_the_server(server: Script) -> None:
    server.replies = [lines({"report": {"added": 1, "removed": 2}})]
    report = RemoteChat(server.url).collection("x").sync({"a": ["A"]})
    assert (report.added, report.removed, report.unchanged) == (1, 2, 0)
    assert [body["sync"] for *_, body in server.asked] == [True]


def test_sync_of_much_is_prefilled_in_parts_and_then_one_change(
    server: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collection, "_AT_ONCE", 1)
    documents = {"a": ["A"], "b": ["B"]}
    server.replies = [lines({"report": {"added": 1}})] * 2 + [lines({"report": {"removed": 2}})]
    report = RemoteChat(server.url).collection("x").sync(documents)
    assert (report.added, report.removed, report.unchanged) == (2, 2, 0)
    assert server.asked[-1][-1] == {"documents": documents, "sources": {}, "sync": True}


def test_sync_that_is_too_large_for_one_request_forgets_in_several(
    server: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collection, "_AT_ONCE", 1)
    ids = Reply(lines=['{"ids": ["a", "b", "c", "d"]}'])
    put = [lines({"report": {"added": 1}})] * 2
    server.replies = [*put, error(413, "too large"), ids, Reply(lines=["{}"])]
    report = RemoteChat(server.url).collection("x").sync({"a": ["A"], "b": ["B"]})
    assert (report.added, report.removed, report.unchanged) == (2, 2, 0)
    method, path, _ = server.asked[-1]
    assert method == "DELETE" and sorted(parse_qs(urlsplit(path).query)["id"]) == ["c", "d"]


def test_document_without_text_is_no_unchanged_one(server: Script) -> None:
    server.replies = [lines({"report": {"removed": 1}})]
    report = RemoteChat(server.url).collection("x").add({"a": " ", "b": ["B"]})
    assert (report.removed, report.unchanged) == (1, 1)


def test_document_that_a_server_does_not_take_is_no_unchanged_one(server: Script) -> None:
    server.replies = [error(413, "texts of more than 2 MiB")]
    with pytest.raises(errors.ServerRefusalError, match="2 MiB"):
        RemoteChat(server.url).collection("x").sync({"a": ["A"]})
    assert [method for method, *_ in server.asked] == ["PUT"], "nothing was forgotten"


def test_server_that_is_busy_for_a_moment_is_asked_again(
    server: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collection, "_WAITS", 2)
    busy, done = error(503, "other documents", retry_after="0"), lines({"report": {"added": 1}})
    kept = RemoteChat(server.url).collection("x")
    server.replies = [busy, busy, done]
    assert kept.add({"a": ["A"]}).added == 1
    assert [body for *_, body in server.asked] == [{"documents": {"a": ["A"]}, "sources": {}}] * 3
    monkeypatch.setattr(collection, "_UNTOLD_WAIT_S", 0.0)
    for replies in ([error(429), done], [error(503, retry_after="soon"), done]):
        server.replies = list(replies)
        assert kept.add({"a": ["A"]}).added == 1
    monkeypatch.setattr(collection, "_UNTOLD_WAITS", 1)
    for replies in ([busy] * 3, [error(503, "gone for good")] * 2):
        server.replies = list(replies)
        with pytest.raises(errors.ServerBusyError):
            kept.add({"a": ["A"]})
        assert server.replies == []


def test_request_does_not_grow_with_the_store(server: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "_AT_ONCE", 8)
    server.replies = [lines({"report": {"added": 1}}) for _ in range(3)]
    texts = {"a1": ["AAAA"], "b1": ["BBBB"], "a2": ["AAAA"]}
    sources = {"a1": "a", "b1": "b", "a2": "a"}
    report = RemoteChat(server.url).collection("x").add(texts, sources=sources)
    # What a text is prefilled behind is in its request.
    assert [list(body["documents"]) for *_, body in server.asked] == [["a1"], ["b1"], ["a1", "a2"]]
    assert (report.added, report.unchanged) == (3, 0)


def test_address_is_no_longer_than_gateways_take(server: Script) -> None:
    ids = [f"{'é' * 20}-{number}" for number in range(100)]
    server.replies = [Reply(lines=["{}"])] * 100
    RemoteChat(server.url).collection("x").remove(ids)
    assert all(len(path) < 5000 for _, path, _ in server.asked)
    assert [id for _, path, _ in server.asked for id in parse_qs(urlsplit(path).query)["id"]] == ids


def test_404_of_a_gateway_is_not_taken_for_a_collection_without_documents(server: Script) -> None:
    said = {"error": {"message": "no collection 'x'", "type": NO_COLLECTION, "code": 404}}
    kept = RemoteChat(server.url).collection("x")
    for ask in (kept.ids, kept.clear, lambda: kept.remove(["a"])):
        server.replies = [Reply(404, [json.dumps(said)]), error(404, "no such backend")]
        assert not ask()
        with pytest.raises(errors.ConfigError, match="no such backend"):
            ask()


def test_fork_leaves_the_store_of_its_parent() -> None:
    name = owners.volatile("x")
    assert owners.ends_here(name) and not owners.ends_here("x")
    if not (child := os.fork()):
        os._exit(owners.ends_here(name))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("said", ["{}", "[]", '{"ids": 3}', "7"])
def test_words_of_a_broken_server_are_an_error_of_ours(server: Script, said: str) -> None:
    server.replies = [Reply(lines=[said]), Reply(lines=["no json\n"])]
    kept = RemoteChat(server.url).collection("x")
    with pytest.raises(errors.ServerError, match="understood"):
        kept.ids()
    with pytest.raises(errors.ServerError, match="understood"):
        kept.add({"a": ["A"]})


@pytest.mark.parametrize(
    ("reply", "kind", "said"),
    [
        (lines(BEGUN, {"error": "no room", "status": 507}), errors.StoreFullError, "no room"),
        (lines(BEGUN), errors.ServerError, "goes on with these"),
        (Reply(lines=["no gzip"], headers={"content-encoding": "gzip"}), errors.ServerError, "understood"),
        (Reply(lines=[""], cut=True), errors.ServerError, "broke off"),
        (error(507, "full"), errors.StoreFullError, "full"),
        (error(413), errors.ServerRefusalError, "less at once"),
        (error(404), errors.ServerNotFoundError, "no server of blendrag"),
        (error(403, "not yours"), errors.ServerRefusalError, "not yours"),
    ],
)
def test_failure_of_an_ingest_does_not_pass_for_its_end(
    server: Script, reply: Reply, kind: type[Exception], said: str
) -> None:
    server.replies = [reply]
    with pytest.raises(kind, match=said):
        RemoteChat(server.url).collection("x").add({"a": ["A"]})


@given(st.text(min_size=1), st.text(min_size=1))
@example(".", "..")
def test_names_have_a_collection_each_and_none_is_refused(one: str, other: str) -> None:
    path = f"http://host/v1/kb/collections/{_as_path(one)}"
    assert _NAME.fullmatch(_as_path(one)) and str(httpx2.URL("http://host/").join(path)) == path
    assert (_as_path(one) == _as_path(other)) == (one == other)
