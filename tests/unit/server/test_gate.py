"""What a request passes before the server's routes, without an engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException, Request, WebSocket
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import WebSocketDenialResponse

from blendrag.server import Limits
from blendrag.server.gate import Gate, Requests, has_more_values, key_of
from blendrag.server.keys import Key, Keys
from engineless import bearer, keys_of


def keys(**rights: str) -> Keys:
    return keys_of({name: Key(f"of-{name}", frozenset(given.split(","))) for name, given in rights.items()})


LIMITS = Limits(body_mib=1, items=10)


def app(known: Keys | None, requests: Requests | None = None, **options: Any) -> FastAPI:
    """With routes that vLLM's server has, and one that is ours."""
    made = FastAPI(**options)
    made.add_middleware(Gate, keys=known, limits=LIMITS, requests=requests or Requests())

    async def answer(request: Request) -> dict[str, Any]:
        size = len(await request.body())
        return {"namespace": key_of(request).namespace, "size": size}

    async def busy() -> None:
        raise HTTPException(503, "too much to do")

    async def talk(socket: WebSocket) -> None:
        await socket.accept()

    asked = ("/v1/completions", "/v1/responses", "/v1/audio/transcriptions", "/invocations")
    for path in ("/health", "/metrics", "/v1/models", *asked):
        made.add_api_route(path, answer, methods=["GET", "POST"])
    made.add_api_route("/v1/kb/prefetch", busy, methods=["POST"])
    made.add_api_websocket_route("/v1/realtime", talk)
    return made


def test_key_opens_its_own_tenant_only() -> None:
    client = TestClient(app(keys(one="ask", other="ask,admin")))
    for name in ("one", "other"):
        answer = client.post("/v1/completions", headers=bearer(name))
        assert answer.json()["namespace"] == f"of-{name}"
    for spelt in ("bearer one", "Bearer  one"):
        assert client.post("/v1/completions", headers={"Authorization": spelt}).status_code == 200
    assert client.get("/metrics", headers=bearer("one")).status_code == 403
    assert client.get("/metrics", headers=bearer("other")).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/responses/x", "/v1/messages/count_tokens", "/invocations", "/redoc", "/v1/completions/"]
)
def test_route_that_is_not_listed_is_closed(path: str) -> None:
    client = TestClient(app(keys(one="ask,ingest,admin")))
    assert client.post(path).status_code == 401
    closed = client.post(path, headers=bearer("one"))
    assert (closed.status_code, closed.json()["error"]["message"]) == (404, "Not Found"), "as without keys"
    assert client.get("/health").status_code == 200
    assert client.post("/health").status_code == 401


def test_key_is_where_anthropics_clients_have_it_too() -> None:
    client = TestClient(app(keys(one="ask")))
    named = [{"x-api-key": key} for key in ("one", "two", "")]
    for headers, status in zip([*named, bearer("two") | named[0]], (200, 401, 401, 401), strict=True):
        assert client.post("/v1/completions", headers=headers).status_code == status


def test_web_socket_is_closed() -> None:
    client = TestClient(app(keys(one="ask")))
    for headers, status in (({}, 401), (bearer("one"), 404)):
        with pytest.raises(WebSocketDenialResponse) as caught:
            client.websocket_connect("/v1/realtime", headers=headers).__enter__()
        assert caught.value.status_code == status


def test_proxy_before_the_server_leaves_its_routes_in_place() -> None:
    """Which keeps the path under which it has the server, or not."""
    client = TestClient(app(keys(one="ask"), root_path="/llm"))
    for path in ("/llm/v1/completions", "/v1/completions"):
        assert client.post(path, headers=bearer("one")).status_code == 200
        assert client.post(path).status_code == 401
    assert client.get("/llm/health").status_code == 200


def test_server_without_keys_lets_everyone_in() -> None:
    client = TestClient(app(None))
    assert client.post("/v1/responses").json()["namespace"] == ""
    assert client.get("/docs").status_code == 200


async def _sent(parts: int, **headers: str) -> httpx.Response:
    """An answer to a body of so many MiB."""

    async def body() -> AsyncIterator[bytes]:
        for _ in range(parts):
            yield b" " * (1 << 20)

    transport = httpx.ASGITransport(app(None))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.post("/v1/completions", content=body(), headers=headers)


async def test_limit_is_of_all_bodies_whether_or_not_they_say_how_long_they_are() -> None:
    assert (await _sent(1)).status_code == 200
    for parts, headers in ((2, {}), (1, {"content-length": str(2 << 20)})):
        answer = await _sent(parts, **headers)
        assert answer.status_code == 413 and "--max-body-mib" in answer.text


@pytest.mark.parametrize("length", ["many", "-1", "1.5", pytest.param("9" * 5000, id="digits")])
async def test_length_that_is_no_number_is_passed_over(length: str) -> None:
    for parts, status in ((1, 200), (2, 413)):
        assert (await _sent(parts, **{"content-length": length})).status_code == status


def test_busy_server_says_when_to_come_again() -> None:
    assert TestClient(app(None)).post("/v1/kb/prefetch").headers["retry-after"] == "5"


def test_server_that_is_about_to_end_answers_what_is_under_way_and_nothing_else() -> None:
    requests = Requests()
    served = app(None, requests)

    async def slow() -> int:
        requests.ending = True
        return requests.under_way

    served.add_api_route("/slow", slow)
    client = TestClient(served)
    assert client.get("/slow").json() == 1
    assert requests.under_way == 0
    for path in ("/health", "/slow", "/v1/models"):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


def values(found: Any) -> float:
    """As :func:`has_more_values` counts them."""
    if isinstance(found, dict):
        return 1 + sum(1 + values(value) for value in found.values())
    if isinstance(found, list):
        return 1 + sum(map(values, found))
    return 1 if isinstance(found, str) else 0


TEXT = st.text(st.sampled_from('ab"\\\\{[,]} \\n\\ud83dé'), max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=30,
)


@given(JSON, st.booleans(), st.integers(0, 40))
def test_values_are_counted_whatever_is_written_in_them(found: Any, escaped: bool, most: int) -> None:
    body = json.dumps(found, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    commas = json.dumps(found).count(",") // 16  # at most: the separators count like numbers
    said = has_more_values(body, most)
    assert said or values(found) <= most
    assert not said or values(found) + commas > most


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "x"}] * 100},
        {"prompt": ["x"] * 200},
        {"blendrag": {"documents": ["x"] * 200}},
        {"prompt": list(range(10_000))},
        [[]] * 200,
    ],
    ids=["messages", "prompts", "documents", "numbers", "lists"],
)
def test_body_of_many_values_is_refused_by_the_option_that_allows_more(body: Any) -> None:
    answer = TestClient(app(None)).post("/v1/completions", json=body)
    assert answer.status_code == 413
    assert "--max-items" in answer.text
    assert TestClient(app(None)).post("/v1/completions", json=list(range(1000))).status_code == 200


def test_bytes_of_a_file_are_not_taken_for_values() -> None:
    sound = bytes(range(256)) * 1000
    client = TestClient(app(None))
    assert client.post("/v1/audio/transcriptions", files={"file": sound}).json()["size"] > len(sound)
    assert client.post("/v1/completions", files={"file": sound}).status_code == 413
