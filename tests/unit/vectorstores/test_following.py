"""What a server is told of a store that others change, that breaks off, and that is wrong."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag import RemoteChat, SyncReport
from blendrag.errors import ConfigError, MissingDependencyError, SourceError, StoreFullError
from blendrag.serving.collection import KeptDocuments
from blendrag.vectorstores import STORES, Address, Fields, StoreReport, VectorStore, interface, sync, text_of
from keeping_server import Keeping
from scripted_server import error, scripted

KEY = "s3cr3t-of-the-store"


class Listed(VectorStore):
    """Rows of a list, two a page. breaks: at the page of this number."""

    package = "none"

    def __init__(self, *rows: tuple[str, Fields | str], breaks: int | None = None) -> None:
        super().__init__(None, "handbook")
        self.rows = [(id, {"text": row} if isinstance(row, str) else row) for id, row in rows]
        self.breaks, self.error = breaks, Exception(f"gone\naway with {KEY}")

    @classmethod
    def connect(cls, at: Address) -> Listed:
        raise NotImplementedError

    def pages(self) -> Iterator[list[tuple[str, Fields]]]:
        for number, begin in enumerate(range(0, len(self.rows), 2)):
            if number == self.breaks:
                raise self.error
            yield self.rows[begin : begin + 2]

    def count(self) -> int:
        return len(self.rows)

    def names(self) -> list[str]:
        return ["handbook"]

    def close(self) -> None:
        raise AssertionError("it is the caller's")


def followed(server: Keeping, store: VectorStore, **options: Any) -> StoreReport:
    return sync(store, RemoteChat(server.url).collection("handbook"), progress=False, **options)


ABC = [("a", "A."), ("b", "B."), ("c", "C.")]


def test_nothing_is_released_when_the_scroll_broke_off(server: Keeping) -> None:
    followed(server, Listed(*ABC))
    with pytest.raises(SourceError, match="gone away"):
        followed(server, Listed(("new", "New."), ("a", "A."), ("d", "D."), breaks=1))
    assert server.texts == ["A.", "B.", "C.", "New."]
    assert followed(server, Listed(("new", "New."), ("a", "A."), ("d", "D."))).removed == 2
    assert server.texts == ["A.", "D.", "New."]


@pytest.mark.parametrize("times", [1, 2])
def test_interrupted_run_goes_on_where_it_was(server: Keeping, times: int) -> None:
    rows = [(str(n), f"{n}.") for n in range(8)]
    for at in range(1, times + 1):
        store = Listed(*rows, breaks=at)
        store.error = KeyboardInterrupt()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            followed(server, store)
    report = followed(server, Listed(*rows))
    assert (report.added, report.unchanged) == (8 - 2 * times, 2 * times)
    assert sum(map(len, server.puts)) == len(rows)


def test_full_server_loses_nothing(server: Keeping) -> None:
    followed(server, Listed(*ABC))
    server.full = True
    with pytest.raises(StoreFullError):
        followed(server, Listed(("new", "New.")))
    assert server.texts == ["A.", "B.", "C."]


def test_text_that_moved_to_another_id_is_there_all_the_time(server: Keeping) -> None:
    followed(server, Listed(*ABC))
    report = followed(server, Listed(("z", "A."), *ABC[1:]))
    assert (report.added, report.removed) == (1, 1)
    methods = [method for method, path, _ in server.script.asked if "collections" in path]
    assert methods.index("DELETE") > max(at for at, method in enumerate(methods) if method == "PUT")


def test_emptied_store_is_forgotten_and_one_without_texts_is_not(server: Keeping) -> None:
    followed(server, Listed(*ABC))
    for wrong in ({"text_field": "txt"}, {"text_field": "metadata.text"}):
        with pytest.raises(ConfigError, match="no row has a text in"):
            followed(server, Listed(*ABC), **wrong)
    with pytest.raises(ConfigError, match="fields are body_, title: name"):
        followed(server, Listed(("a", {"body_": "A.", "title": "T"})))
    assert server.texts == ["A.", "B.", "C."]
    assert followed(server, Listed()).removed == 3
    assert server.texts == []


def test_misspelt_field_is_told_with_the_one_that_may_be_meant(server: Keeping) -> None:
    with pytest.raises(ConfigError, match="did you mean contents"):
        followed(server, Listed(("a", {"contents": "A.", "n": 1})), text_field="content")


def test_rows_that_have_no_text_or_too_much_are_counted(server: Keeping) -> None:
    rows = [("a", "A."), ("empty", ""), ("blank", " \n"), ("none", {"text": None}), ("long", "x" * (1 << 21))]
    report = followed(server, Listed(*rows, ("large", "y" * (1 << 20))))
    assert (report.added, report.textless, report.too_large) == (2, 3, 1)


def test_what_an_earlier_run_left_to_prefill_is_asked_for(server: Keeping) -> None:
    followed(server, Listed(*ABC))
    followed(server, Listed(*ABC))
    assert server.puts[-1] == []


def test_ids_and_texts_of_any_kind_are_kept_apart(server: Keeping) -> None:
    rows = [("a#b", "A."), ("a", "b#A."), ("", "B."), ("\ud800", "\udc00"), ("é" * 300, "é")]
    assert followed(server, Listed(*rows)).added == len(rows)
    assert followed(server, Listed(*rows)).unchanged == len(rows)
    assert followed(server, Listed(*rows[:1])).removed == len(rows) - 1


class Kept(KeptDocuments):
    """A collection of a set of documents."""

    name = "kept"

    def __init__(self) -> None:
        self.documents: dict[str, Iterable[str]] = {}

    def ids(self) -> set[str]:
        return set(self.documents)

    def remove(self, ids: Iterable[str]) -> None:
        for id in ids:
            del self.documents[id]

    def clear(self) -> None:
        self.documents.clear()

    def _keep(self, documents: Any, sources: Any, progress: Any, *, only: bool) -> SyncReport:
        self.documents |= documents
        return SyncReport()


@given(st.lists(st.dictionaries(st.text(max_size=2), st.sampled_from("ABC"), max_size=6), max_size=4))
def test_what_is_kept_is_what_the_store_holds(contents: list[dict[str, str]]) -> None:
    kept, held = Kept(), dict[str, str]()
    for now in contents:
        report = sync(Listed(*now.items()), kept, progress=False)
        assert sorted(text for (text,) in kept.documents.values()) == sorted(now.values())
        assert report.added == len(now.keys() - held.keys())
        assert report.removed == len(held.keys() - now.keys())
        assert report.changed == sum(held[id] != now[id] for id in now.keys() & held.keys())
        held = now


# -- texts in rows ----------------------------------------------------------------------------------------


ROW = {"text": "A.", "a.b": "B.", "meta": {"body": "C.", "n": 1}}


@pytest.mark.parametrize(
    ("row", "named", "text"),
    [
        ({"page_content": "A.", "metadata": {"source": "x"}}, None, "A."),  # LangChain
        ({"text": "A.", "pk": 7}, None, "A."),
        ({"content": "A.", "title": "T"}, None, "A."),
        ({"_node_content": '{"text": "A.", "metadata": {}}', "doc_id": "d"}, None, "A."),  # LlamaIndex
        ({"_node_content": '{"text": ""}', "text": "A."}, None, "A."),
        ({"_node_content": '{"text_resource": {"text": "A."}}'}, None, "A."),
        ({"content_with_weight": "A."}, None, "A."),  # RAGFlow
        ({"doc_content": "A."}, None, "A."),  # Spring AI
        ({"text_segment": "A."}, None, "A."),  # LangChain4j
        ({"namespace": "w", "metadata": {"text": "A.", "title": "T"}}, None, "A."),  # AnythingLLM
        (ROW, "a.b", "B."),
        (ROW, "meta.body", "C."),
        *((ROW, name, None) for name in ("meta.n", "meta.x.y", "x")),
    ],
)
def test_text_is_where_frameworks_keep_it_or_in_a_named_field(
    row: Fields, named: str | None, text: str | None
) -> None:
    assert text_of(row, named) == text


@given(st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.lists(st.text())), st.text())
def test_row_of_any_kind_has_a_text_or_none(row: Fields, node: str) -> None:
    text = text_of({**row, "_node_content": node})
    assert text is None or (text.strip() and text in row.values())


# -- addresses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("qdrnt://h/x", "did you mean qdrant?"),
        ("qdrant://h", "names no collection"),
        ("handbook", "no URL of a vector store"),
        (f"qdrant://:{KEY}@h:port/x", "no URL of a vector store"),
        (f"chroma://h/x?tennant={KEY}", "did you mean tenant?"),
        (f"qdrant://h/x?api_key={KEY}", "no option 'api_key'"),
        ("weaviate://h/proxy/x", "weaviate URLs have no folder before the collection, not proxy"),
        ("milvus://h/proxy/db/x", "milvus URLs have 1 folder before the collection, not proxy/db"),
        ("lancedb:///no/such/folder/x", "no folder '/no/such/folder'|pip install lancedb"),
    ],
)
def test_wrong_url_is_told_in_one_line(url: str, said: str) -> None:
    with pytest.raises((ConfigError, MissingDependencyError), match=said) as raised:
        sync(url, Kept(), progress=False)
    assert KEY not in str(raised.value) and "\n" not in str(raised.value)


def test_parts_of_a_url_are_read() -> None:
    at = Address.read("milvus+https://me:a%2Fb@h:1/db/hand%20book")
    assert (at.user, at.key, at.url, at.folders, at.collection) == (
        "me", "a/b", "https://h:1", ("db",), "hand book"
    )  # fmt: skip
    assert Address.read("qdrant://h/x", "given\n").key == "given", "what a client says of a line end shows it"
    assert Address.read("qdrant://:own@h/x", "given").key == "own"
    assert Address.read("elasticsearch://[::1]/x").url == "http://[::1]:9200"


@pytest.mark.parametrize("kind", ["qdrant", "chroma", "elasticsearch", "opensearch"])
def test_store_behind_a_folder_of_a_proxy_is_asked_there(kind: str) -> None:
    modules = {"qdrant": "qdrant_client", "chroma": "chromadb", "opensearch": "opensearchpy"}
    pytest.importorskip(modules.get(kind, kind))
    with scripted() as proxy:
        proxy.always = lambda *_: error(418, "no store")
        url = proxy.url.replace("http", kind) + "/behind/a%20proxy/handbook"
        with pytest.raises(SourceError, match="/behind/a proxy/handbook cannot be read"):
            sync(url, Kept(), progress=False)
    assert proxy.asked and all(path.startswith("/behind/a%20proxy/") for _, path, _ in proxy.asked)


@pytest.mark.parametrize("kind", ["qdrant", "chroma"])
def test_key_is_shown_nowhere(
    kind: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    at = Address.read(f"{kind}://:{KEY}@127.0.0.1:1/x")
    assert KEY not in f"{at} {at!r}"
    with pytest.raises(SourceError, match=f"{kind}://127.0.0.1:1/x cannot be read") as raised:
        sync(at, Kept(), progress=False)
    shown = [str(raised.value), caplog.text, *capfd.readouterr()]
    assert not [text for text in shown if KEY in text]


def test_what_a_client_says_is_one_line_without_the_key() -> None:
    at = Address.read(f"qdrant://:{KEY}@h/x")
    with pytest.raises(SourceError) as raised, interface.failures(at):
        raise Listed().error
    assert str(raised.value) == "qdrant://h:6333/x cannot be read: gone away with ***"


def test_client_that_cannot_be_closed_fails_no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, whole, broken = Kept(), Listed(*ABC), Listed(*ABC, breaks=0)
    monkeypatch.setattr(STORES["qdrant"], "connect", lambda _: whole)
    assert sync("qdrant://h/x", kept, progress=False).added == 3
    monkeypatch.setattr(STORES["qdrant"], "connect", lambda _: broken)
    with pytest.raises(SourceError, match="gone away"):
        sync("qdrant://h/x", kept, progress=False)


def test_missing_client_is_one_line_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(kind.package for kind in STORES.values())
    monkeypatch.setitem(sys.modules, "qdrant_client", None)
    with pytest.raises(MissingDependencyError, match="pip install qdrant-client"):
        sync("qdrant://h/x", Kept(), progress=False)


def test_tenants_of_one_store_are_followed_by_two_names() -> None:
    names = {str(Address.read(f"chroma://h/x{tenant}")) for tenant in ("", "?tenant=a", "?tenant=b")}
    assert len(names) == 3 and all("chroma://h:8000/x" in name for name in names)
