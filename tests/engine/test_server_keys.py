"""A server with keys, as its tenants see it: one for all of these tests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from blendrag.models import DEFAULT_MODEL
from blendrag.server.blending import BlendFields
from served import CHAT, COMPLETIONS, FILLER, KB, TEXTS, Server

pytestmark = [
    pytest.mark.own_engine,
    pytest.mark.nightly,
    pytest.mark.xdist_group("server-keys"),
]

RIGHTS = {
    "ours": "acme ask,ingest",
    "theirs": "globex ask,ingest",
    "asking": "acme ask",
    "watching": "operators admin",
    "busy": "busy ask,ingest",
}
MIB = 1 << 20
TIERS = json.dumps([{"kind": "ram", "bytes": 2 << 30}, {"kind": "disk", "bytes": 48 * MIB}])
EXPLAIN, STATS = "/v1/kb/explain", "/v1/kb/stats"


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Six requests at once, 48 MiB of KV a tenant, 2 MiB a body."""
    root = tmp_path_factory.mktemp("server")
    lines = [f"{hashlib.sha256(key.encode()).hexdigest()} {whose}" for key, whose in RIGHTS.items()]
    (root / "keys").write_text("\n".join(["# of this test", *lines]))
    limits = ["--max-num-queued-reqs", "6", "--tiers", TIERS, "--max-body-mib", "2"]
    running = Server(root / "kv", "--keys", str(root / "keys"), *limits).wait()
    yield running
    running.end()


@pytest.fixture(scope="module")
def ours(server: Server) -> Server:
    held = server.held_by("ours")
    assert held.put(TEXTS)["chunks"] == len(TEXTS)
    return held


@pytest.fixture(scope="module")
def theirs(server: Server) -> Server:
    return server.held_by("theirs")


def routes(server: Server) -> list[tuple[str, str]]:
    """All that vLLM and we describe, and some that are not described."""
    paths = server.held_by("ours").client.get("/openapi.json").json()["paths"]
    described = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    return [*described, ("GET", "/docs"), ("GET", "/metrics"), ("GET", "/metrics/"), ("GET", "/nothing")]


def test_route_is_closed_without_a_key(server: Server) -> None:
    assert len(routes(server)) > 20
    for method, path in routes(server):
        expected = 200 if (method, path) == ("GET", "/health") else 401
        for headers in ({}, *({"Authorization": said} for said in ("Bearer wrong", "Basic ours", "ours"))):
            answer = server.client.request(method, path, headers=headers)
            assert answer.status_code == expected, (method, path, headers)
    assert "www-authenticate" in server.client.get("/v1/models").headers


def test_route_that_salts_nothing_is_closed_to_every_key(server: Server, ours: Server) -> None:
    kept = {CHAT, COMPLETIONS, EXPLAIN, STATS, "/v1/kb/prefetch", "/v1/kb/collections/{name}"}
    kept |= {"/v1/kb/model", "/v1/kb/tokens", "/v1/kb/split", "/v1/kb/collections", "/v1/kb/prompts"}
    kept |= {"/v1/models", "/version", "/load", "/metrics", "/docs", "/health"}
    kept |= {"/v1/responses", "/v1/messages"}
    others = [(method, path) for method, path in routes(server) if path not in kept]
    assert {"/invocations", "/tokenize", "/detokenize"} <= {path for _, path in others}
    for method, path in others:
        assert ours.client.request(method, path, json={}).status_code == 404, (method, path)
    for path in (f"{CHAT}/", f"/{CHAT}", f"{CHAT}%0A", "/v1/realtime"):
        assert ours.client.post(path, json={}).status_code == 404, path


@pytest.mark.parametrize(
    ("key", "method", "path"),
    [
        *product(["asking"], ["PUT", "GET", "DELETE"], [KB]),
        *product(["asking"], ["GET"], ["/v1/kb/collections", "/v1/kb/prompts"]),
        *product(["watching"], ["POST"], [CHAT, COMPLETIONS, EXPLAIN]),
        ("watching", "PUT", KB),
        ("ours", "GET", "/metrics"),
    ],
)
def test_key_is_refused_what_it_has_no_right_to(server: Server, key: str, method: str, path: str) -> None:
    assert server.held_by(key).client.request(method, path, json={}).status_code == 403


def test_tenant_does_not_reach_what_another_keeps(server: Server, ours: Server, theirs: Server) -> None:
    assert theirs.client.get(KB).status_code == 404
    assert theirs.client.delete(KB).status_code == 404
    assert theirs.client.get(STATS, params={"namespace": "acme"}).status_code == 404
    assert theirs.client.get(STATS).json()["chunks"]["chunks"] == 0
    explained = theirs.client.post(EXPLAIN, json={"prompt": TEXTS["city-1"], "model": DEFAULT_MODEL}).json()
    assert explained["cached"] == 0
    assert theirs.client.post("/v1/kb/prefetch", json={"texts": list(TEXTS.values())}).status_code == 200
    assert theirs.ask().json()["blendrag"]["reused"] == 0
    assert ours.client.get(KB).json()["ids"] == sorted(TEXTS)

    watching = server.held_by("watching").client
    assert watching.get(STATS, params={"namespace": "acme"}).json()["chunks"]["ready"] == len(TEXTS)
    assert watching.get(STATS, params={"namespace": "nobody"}).status_code == 404


def test_tenants_share_neither_blocks_nor_chunks(server: Server, ours: Server, theirs: Server) -> None:
    """Whatever one does, the other is answered as if it were alone."""
    for fields in ({"blend": False}, {"blend": True}):
        messages = [{"role": "user", "content": "\n\n".join([f"These are {fields}:", *TEXTS.values()])}]
        found = [
            who.ask(messages=messages, blendrag=fields).json()["blendrag"]["prefix"]
            for who in (ours, ours, theirs, theirs)
        ]
        assert found[0] == found[2] == 0
        assert found[1] and found[3], "the test could not tell"
    several = [f"{n} times upon a time " * 80 for n in range(2)]
    prompt = {"model": DEFAULT_MODEL, "prompt": several, "max_tokens": 1}
    usages = [who.client.post(COMPLETIONS, json=prompt).json()["usage"] for who in (ours, ours, theirs)]
    cached = [(usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0 for usage in usages]
    assert cached[0] == cached[2] == 0
    assert cached[1], "the test could not tell"

    assert theirs.put(TEXTS)["chunks"] == len(TEXTS), "what the other has stored is taken"
    folders = [server.folder / who / "kv" for who in ("acme", "globex")]
    files = [{path.name for path in folder.rglob("*.safetensors")} for folder in folders]
    assert len(files[0]) == len(files[1]) == len(TEXTS)
    assert not files[0] & files[1]
    another = "When was Alpha2 founded?"
    first, second = (who.ask(another, blendrag={"evidence": True}).json() for who in (ours, theirs))
    assert first["choices"][0]["message"]["content"] == second["choices"][0]["message"]["content"]
    assert first["blendrag"]["reused"] == second["blendrag"]["reused"] > 0
    keys = [{row["chunk_key"] for row in one["blendrag"]["documents"]} - {None} for one in (first, second)]
    assert keys[0] and not keys[0] & keys[1]

    assert theirs.client.delete(KB).json() == {"removed": len(TEXTS)}
    assert ours.ask(f"{another} Say it again.").json()["blendrag"]["reused"] > 0


def test_recipe_of_a_tenant_is_refused_from_another(theirs: Server, server: Server) -> None:
    store = str(server.folder / "acme")
    stolen = {"blendrag": {"store": store, "spans": [["key", 0, 8]], "options": {}}, "seal": "0" * 64}
    for more in ({"kv_transfer_params": stolen}, {"vllm_xargs": {"kv_transfer_params": json.dumps(stolen)}}):
        assert theirs.ask(**more).status_code == 400


def test_image_of_another_tenant_cannot_be_asked_for_by_name(ours: Server) -> None:
    part = {"type": "image_url", "image_url": None, "uuid": "theirs"}
    answer = ours.ask(messages=[{"role": "user", "content": [part]}])
    assert answer.status_code == 400
    assert "uuid" in answer.text


def test_explained_is_what_is_done(ours: Server) -> None:
    body = {
        "model": DEFAULT_MODEL,
        "messages": [{"role": "user", "content": "\n\n".join([*TEXTS.values(), "Who founded Alpha0?"])}],
        "blendrag": {"documents": ["Nobody has told of this."], "evidence": True},
        "max_tokens": 1,
    }
    explained = ours.client.post(EXPLAIN, json=body).json()
    done = ours.client.post(CHAT, json=body).json()["blendrag"]
    assert explained["tokens"] == done["prompt"]
    assert explained["cached"] == done["reused"] + done["recomputed"] > 0
    assert explained["plain"] is None
    # How the question attends is known only once it is done.
    attention = [row.pop("attention") for row in done["documents"] if row["kind"] == "cached"]
    assert sum(attention) == pytest.approx(1, abs=1e-3)
    assert explained["rows"] == done["documents"]
    assert [row["kind"] for row in explained["rows"]].count("not found") == 1
    assert "Who founded Alpha0?" in explained["text"]
    plain = ours.client.post(EXPLAIN, json=body | {"n": 2}).json()
    assert "several answers" in plain["plain"]
    for wrong in ({"blendrag": {"documnts": []}}, {"messages": 3}, {"kv_transfer_params": {"a": 1}}):
        assert ours.client.post(EXPLAIN, json=body | wrong).status_code == 400


def test_completion_is_planned_by_its_own_text(ours: Server) -> None:
    messages = [{"role": "user", "content": TEXTS["city-3"]}]
    body = {"model": DEFAULT_MODEL, "prompt": f"{TEXTS['city-2']}\n\nAlpha2 has", "max_tokens": 1}
    answer = ours.client.post(COMPLETIONS, json=body | {"messages": messages, "blendrag": {"evidence": True}})
    rows = answer.json()["blendrag"]["documents"]
    assert [row["source"] for row in rows if row["kind"] == "cached"] == ["city-2"]


def test_body_that_is_too_large_is_refused(ours: Server) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(5):
            yield b" " * MIB

    headers = {"Content-Type": "application/json"}
    for content in (b" " * (3 * MIB), chunks()):
        try:
            answer = ours.client.post(CHAT, content=content, headers=headers)
        except httpx.WriteError:  # it hangs up on who goes on sending
            continue
        assert answer.status_code == 413
        assert "2 MiB" in answer.json()["error"]["message"]
    assert ours.client.post(CHAT, json={"messages": "x" * MIB}).status_code == 400


def test_full_store_is_a_failure_of_the_server(ours: Server) -> None:
    large = {"too-large": FILLER * 9}
    answer = ours.client.put(KB.replace("cities", "large"), json={"documents": large})
    last = json.loads(answer.text.splitlines()[-1])
    assert 507 in (answer.status_code, last.get("status")), answer.text
    assert ours.client.delete(KB.replace("cities", "large")).status_code == 200
    assert ours.ask("Is all well?").json()["blendrag"]["plain"] is None


def test_full_queue_says_when_to_come_again(server: Server) -> None:
    busy = server.held_by("busy")
    with ThreadPoolExecutor(16) as pool:
        more = {"max_tokens": 48, "ignore_eos": True}
        asked = list(pool.map(lambda n: busy.ask(f"Tell a story of {n}.", **more), range(16)))
        texts = [{f"{n}": f"Village {n} has nine houses. {FILLER}"} for n in range(16)]
        puts = list(pool.map(lambda one: busy.client.put(KB, json={"documents": one}), texts))
    for answers in (asked, puts):
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 503}, statuses
        refused = [answer for answer in answers if answer.status_code == 503]
        assert all(int(answer.headers["retry-after"]) > 0 for answer in refused)
    assert busy.client.delete(KB).status_code == 200


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=8)  # surrogates, too
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=8,
)
PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "image_url", "tool", "refusal"]) | ANY_TEXT},
        optional={"text": JSON},
    ),
    max_size=3,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"]) | ANY_TEXT},
        optional={"content": ANY_TEXT | PARTS | JSON, "tool_calls": JSON, "name": JSON, "tool_call_id": JSON},
    ),
    max_size=3,
)
TEXTS_OF_ANY_KIND = st.fixed_dictionaries(
    {}, optional={"texts": st.lists(ANY_TEXT, max_size=3)}
) | st.fixed_dictionaries(
    {
        "documents": st.dictionaries(ANY_TEXT, ANY_TEXT | st.lists(ANY_TEXT, max_size=2), max_size=2),
        "sources": st.dictionaries(ANY_TEXT, ANY_TEXT, max_size=2),
    }
)
MALFORMED = [
    *product(["POST"], [CHAT, COMPLETIONS, EXPLAIN, "/v1/kb/prefetch", "/v1/kb/tokens", "/v1/kb/split"]),
    *product(["GET"], [KB, "/v1/kb/model", STATS]),
    *product(["PUT", "DELETE"], [KB]),
]
RIGHT = {
    CHAT: {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1},
    COMPLETIONS: {"model": DEFAULT_MODEL, "prompt": "Hello.", "max_tokens": 1},
    KB: {"documents": {"one": "A text."}, "sources": {}, "sync": False},
    "/v1/kb/prefetch": {"texts": ["A text."]},
    "/v1/kb/tokens": {"texts": ["A text."]},
    "/v1/kb/split": {"texts": ["A text."], "chunk_tokens": 16, "chunk_overlap": 4},
}
# What a client may rightly ask for, and takes long.
SLOW = {"n", "max_tokens", "max_completion_tokens", "best_of"}


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.nightly(part="large"))])
def test_malformed_request_is_no_500_and_leaves_no_memory(ours: Server, count: int) -> None:
    schemas = ours.client.get("/openapi.json").json()["components"]["schemas"]
    names = {
        name for kind in ("Chat", "") for name in schemas[f"Blended{kind}CompletionRequest"]["properties"]
    }
    ours_too = {"documents", "sources", "sync", "texts", "chunk_tokens", "chunk_overlap"}
    fields = st.sampled_from(sorted(names - SLOW | ours_too))
    inside = st.sampled_from(sorted(BlendFields.model_fields))
    changes = st.dictionaries(fields | ANY_TEXT, JSON, max_size=3)
    changes |= st.fixed_dictionaries({"blendrag": st.dictionaries(inside | ANY_TEXT, JSON, max_size=2)})
    changes |= st.fixed_dictionaries({"messages": MESSAGES}) | TEXTS_OF_ANY_KIND
    held: list[int] = []

    @hypothesis_settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.sampled_from(MALFORMED), changes, JSON, st.binary(max_size=16), st.integers(0, 19), ANY_TEXT)
    def send(
        route: tuple[str, str], changed: dict[str, Any], other: Any, raw: bytes, how: int, text: str
    ) -> None:
        method, path = route
        right = RIGHT.get(path, RIGHT[CHAT])
        if "model" not in right and how > 9:  # of fields that there are not, no value is looked at
            changed = {name: value for name, value in changed.items() if name in right}
        content = {0: raw, 1: json.dumps(other).encode(), 2: b"[" * 100_000}.get(
            how, json.dumps(right | changed).encode()
        )
        kind = "application/json" if how != 3 else "text/plain"
        params = {"id": text.encode("utf-8", "replace").decode(), "namespace": repr(text)}
        url = path.replace("cities", "malformed" if how != 4 else "a%2Fb%00")
        answer = ours.client.request(
            method, url, content=content, headers={"Content-Type": kind}, params=params if how == 5 else None
        )
        assert answer.status_code < 500, f"{route} {content[:200]!r}: {answer.text}"
        held.append(ours.memory() if len(held) % 500 == 0 else 0)

    send()
    assert ours.ask("Is all well again?").json()["blendrag"]["plain"] is None
    sizes = [size // MIB for size in held if size]
    assert len(sizes) < 4 or sizes[-1] - sizes[len(sizes) // 4] < 64, sizes
