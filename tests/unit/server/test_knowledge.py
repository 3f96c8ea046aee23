"""Routes of what the server keeps, over a library without an engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from blendrag.errors import EngineError
from blendrag.server import Limits, knowledge
from blendrag.server.blending import Blending
from blendrag.server.keys import Key, Keys
from blendrag.serving.library import Library
from blendrag.settings import Settings
from engineless import app_of, bearer, keep, keys_of

pytestmark = pytest.mark.timeout(60)

SETTINGS = Settings.load(max_model_len=512)
PATH = "/v1/kb/collections/cities"
JSON = {"content-type": "application/json"}


@pytest.fixture
def blending(tmp_path: Path, model_dir: Path) -> Iterator[Blending]:
    library = Library(tmp_path / "kv", SETTINGS, shared=True)
    engine: Any = None  # nothing here asks it
    yield Blending(library, SETTINGS, engine, "model", "seal")
    library.close()


def client_of(blending: Blending, keys: Keys | None = None) -> httpx.AsyncClient:
    app = app_of({"": blending}, keys, Limits(body_mib=4, text_mib=1))
    app.include_router(knowledge.router)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


@pytest.fixture
async def client(blending: Blending) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(blending) as made:
        yield made


def keep_cities(blending: Blending, *ids: str) -> None:
    keep(blending, "cities", **{id: f"Of {id}." for id in ids})


async def test_misspelt_parameter_removes_nothing(blending: Blending, client: httpx.AsyncClient) -> None:
    keep_cities(blending, "a", "b")
    for answer, said in (
        (await client.delete(PATH, params={"ids": "a"}), "did you mean id?"),
        (await client.get("/v1/kb/stats", params={"namspace": "acme"}), "did you mean namespace?"),
        (await client.put(PATH, params={"sync": "true"}, json={"documents": {"c": ""}}), "unknown parameter"),
        (await client.get(PATH, params={"ids": "a"}), "unknown parameter"),
    ):
        assert answer.status_code == 400 and said in answer.text
    assert (await client.get(PATH)).json() == {"ids": ["a", "b"]}
    assert (await client.delete(PATH, params={"id": "a"})).json() == {"removed": 1}
    assert (await client.get(PATH)).json() == {"ids": ["b"]}


async def test_document_whose_id_has_a_nul_is_forgotten_and_no_other(
    blending: Blending, client: httpx.AsyncClient
) -> None:
    keep_cities(blending, "a", "a\0b")
    assert (await client.delete(PATH, params={"id": "a\0b"})).json() == {"removed": 1}
    assert (await client.get(PATH)).json() == {"ids": ["a"]}


@pytest.mark.parametrize("body", [b'{"ids": ["a"]}', b"[]", b"a"])
async def test_body_of_a_delete_removes_nothing(
    blending: Blending, client: httpx.AsyncClient, body: bytes
) -> None:
    keep_cities(blending, "a", "b")
    for params in ({}, {"id": "a"}):
        answer = await client.request("DELETE", PATH, params=params, content=body, headers=JSON)
        assert answer.status_code == 400 and "?id=" in answer.text
    assert (await client.get(PATH)).json() == {"ids": ["a", "b"]}


@pytest.mark.parametrize("body", [b"{}", b" {}\n", b"null"])
async def test_delete_whose_body_says_nothing_is_one_without(
    blending: Blending, client: httpx.AsyncClient, body: bytes
) -> None:
    keep_cities(blending, "a", "b")
    answer = await client.request("DELETE", PATH, params={"id": "a"}, content=body, headers=JSON)
    assert answer.json() == {"removed": 1}
    assert (await client.get(PATH)).json() == {"ids": ["b"]}


async def test_texts_that_prompts_repeat_can_be_listed_and_forgotten_but_not_put(
    blending: Blending, client: httpx.AsyncClient
) -> None:
    keep(blending, "(repeated)", one="Of one.")
    path = PATH.replace("cities", "(repeated)")
    assert (await client.put(path, json={"documents": {"a": "Of a."}})).status_code == 400
    assert (await client.get(path)).json() == {"ids": ["one"]}
    assert (await client.delete(path)).json() == {"removed": 1}
    assert (await client.get(path)).status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "said"),
    [
        ("PUT", PATH, {"document": {"a": "Of a."}}, "unknown field 'document'; did you mean documents?"),
        ("PUT", PATH, {"documents": ["Of a."]}, "documents: Input should be a valid dictionary"),
        ("PUT", PATH, {"documents": {"a": 1}}, "documents.a: Input should be a valid string"),
        ("PUT", PATH, {"documents": dict.fromkeys(map(str, range(999)), 1)}, "documents.1: Input"),
        ("PUT", PATH, "{documents", "the body is no JSON: Expecting property name"),
        ("PUT", PATH, [], "the body has to be a JSON object"),
        ("PUT", PATH.replace("cities", "my cities"), {"documents": {}}, "name: String should match"),
        ("POST", "/v1/kb/prefetch", {"text": ["Of a."]}, "texts: Field required, unknown field 'text'; did"),
    ],
)
async def test_mistake_in_a_request_is_told_in_one_line(
    client: httpx.AsyncClient, method: str, path: str, body: Any, said: str
) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    answer = await client.request(method, path, content=content, headers=JSON)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert said in message and "\n" not in message and len(message) < 300


async def test_key_sees_the_names_of_its_own_documents_only(blending: Blending) -> None:
    keep_cities(blending, "a", "b")
    rights = {"asks": "ask", "ingests": "ask,ingest", "watches": "admin", "runs": "admin,ingest"}
    keys = {name: Key("", frozenset(given.split(","))) for name, given in rights.items()}
    keys["runs"] = replace(keys["runs"], namespace="other")
    async with client_of(blending, keys_of(keys)) as client:
        for name in keys:
            params = {"namespace": ""} if name == "runs" else {}
            found = await client.get("/v1/kb/stats", params=params, headers=bearer(name))
            assert found.json()["chunks"]["chunks"] == 2
            assert ("cities" in found.text) == (name == "ingests")


async def test_text_that_is_too_long_to_be_tokenised_at_once_is_refused(client: httpx.AsyncClient) -> None:
    long = "It has many streets. " * 60_000  # more than the mebibyte below
    for method, path, body in (
        ("POST", "/v1/kb/tokens", {"texts": [long]}),
        ("POST", "/v1/kb/split", {"texts": [long]}),
        ("PUT", PATH, {"documents": {"a": long}}),
        ("PUT", PATH, {"documents": {"a": ["short", long]}}),
    ):
        answer = await client.request(method, path, json=body)
        assert answer.status_code == 413, path
        assert "--max-text-mib" in answer.text
    assert (await client.get(PATH)).status_code == 404


async def test_documents_that_wait_when_the_server_ends_are_not_begun(
    blending: Blending, client: httpx.AsyncClient
) -> None:
    go = threading.Event()
    blending.ingest(lambda: go.wait(50) and None)
    waiting = asyncio.create_task(client.put(PATH, json={"documents": {"a": "Of a."}}))
    await asyncio.sleep(0.2)
    blending.end()
    go.set()
    assert (await waiting).status_code == 503
    assert (await client.get(PATH)).status_code == 404


HALF = "a\ud800b"  # of a surrogate pair


@pytest.mark.parametrize("path", ["tokens", "split", "prefetch"])
async def test_text_that_cannot_be_encoded_is_read_as_replaced(client: httpx.AsyncClient, path: str) -> None:
    async def answer(text: str) -> httpx.Response:
        content = json.dumps({"texts": [text]})
        return await client.post(f"/v1/kb/{path}", content=content, headers=JSON)

    halved, replaced = await answer(HALF), await answer("a\ufffdb")
    assert halved.status_code == 200
    assert halved.json() == replaced.json()


def test_document_that_cannot_be_encoded_is_kept_as_replaced(blending: Blending) -> None:
    keep_cities(blending, HALF)
    collection = knowledge.Collection(blending.library, "cities")
    assert collection.ids() == {"a\ufffdb"}
    body = knowledge.Documents.model_validate({"documents": {HALF: [HALF]}, "sources": {HALF: HALF}})
    body.model_dump_json().encode()
    collection.remove([HALF])
    assert not collection.ids()


@pytest.mark.parametrize("sync", [False, True])
async def test_document_without_text_is_none(
    sync: bool, blending: Blending, client: httpx.AsyncClient
) -> None:
    keep_cities(blending, "a")
    told = await client.put(PATH, json={"documents": {"a": " ", "c": ["", "\n"]}, "sync": sync})
    report = json.loads(told.text.splitlines()[-1])["report"]
    assert [report[name] for name in ("added", "changed", "unchanged", "removed")] == [0, 0, 0, 1]
    assert not knowledge.Collection(blending.library, "cities").ids()


async def test_changes_that_wait_leave_other_routes_answering(
    blending: Blending, client: httpx.AsyncClient
) -> None:
    keep_cities(blending, *map(str, range(40)))
    go, taken = threading.Event(), threading.Event()

    def hold() -> None:
        with blending.library.texts.changing.mine():
            taken.set()
            go.wait(50)

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait(10)
    try:
        changes = [asyncio.create_task(client.delete(PATH, params={"id": str(n)})) for n in range(40)]
        await asyncio.sleep(0.1)
        for path in ("/v1/kb/stats", PATH):
            assert (await asyncio.wait_for(client.get(path), 20)).status_code == 200
        await asyncio.wait_for(asyncio.to_thread(int), 10)
    finally:
        go.set()
    assert {(await change).status_code for change in changes} == {200}
    holder.join()


async def test_stats_do_not_wait_where_prompts_are_planned(
    blending: Blending, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def stats() -> dict[str, Any]:
        go.wait(50)
        raise EngineError("it ended")

    monkeypatch.setattr(blending.library, "stats", stats)
    waiting = [asyncio.create_task(client.get("/v1/kb/stats")) for _ in range(4)]
    await asyncio.sleep(0.1)
    try:
        assert await asyncio.wait_for(blending.run(int), 10) == 0
    finally:
        go.set()
    for answer in [await one for one in waiting]:
        assert answer.status_code == 500
        assert "it ended" in answer.text


async def test_long_texts_do_not_hold_up_the_end_of_the_server(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM ends its engine in a thread of the loop's own."""
    go = threading.Event()
    monkeypatch.setattr(knowledge, "encode_document", lambda *_: go.wait(50) and [])
    body = {"texts": ["long"]}
    waiting = [asyncio.create_task(client.post("/v1/kb/tokens", json=body)) for _ in range(40)]
    await asyncio.sleep(0.1)
    try:
        await asyncio.wait_for(asyncio.to_thread(int), 10)
    finally:
        go.set()
    assert {(await one).status_code for one in waiting} == {200}


async def test_ingest_that_waits_says_so(blending: Blending, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knowledge, "_SILENCE_S", 0.01)
    first, go = threading.Event(), threading.Event()

    def work(progress: Any) -> Any:
        progress.total(3)
        progress.note("prefill")
        go.wait(50)
        raise EngineError("it ended")

    blending.ingest(lambda: first.wait(50) and None)
    answer: Any = await knowledge._told(blending, work)
    said: list[dict[str, Any]] = []
    async for chunk in answer.body_iterator:
        said.append(json.loads(chunk))
        if len(said) == 3:
            first.set()
        if len(said) > 3 and said[-1] == said[-2] and said[-1].get("doing") == "prefill":
            go.set()
    assert said[:3] == [{"doing": "waiting", "done": 0, "total": 0}] * 3
    assert said[-1] == {"error": "it ended", "status": 500}
