"""The page at /v1/kb/ui and the routes behind it, without an engine, and with a real browser."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient

from blendrag.engine.wire.recipe import Recipe
from blendrag.engine.wire.report import BlendReport
from blendrag.server import knowledge
from blendrag.server.blending import MOST_PROMPTS, Blending, LatestPrompts
from blendrag.server.completions import explained
from blendrag.server.keys import Key
from blendrag.server.page import routes
from blendrag.serving.evidence import PlannedPrompt
from browser import Browser, browser
from engineless import CHAT, COMPLETION, TEXT, Tenants, app_of, bearer, keep, keys_of, tenants_without_engine
from waiting import until

PAGE = "/v1/kb/ui"
EXPLAIN = "/v1/kb/explain"
HTML = {"Accept": "text/html"}
HOSTILE = "<img src=x onerror=hacked=1></title><script>hacked=1</script>\u202e"
KEYS = {"ours": Key("", frozenset({"ask", "ingest"})), "asks": Key("", frozenset({"ask"}))}
KEYS |= {"theirs": Key("globex", frozenset({"ask", "ingest"}))}


tenants = pytest.fixture(tenants_without_engine)


def app(tenants: Tenants, *, locked: bool = False) -> FastAPI:
    """With keys, if it is locked."""
    made = app_of(tenants, keys_of(KEYS) if locked else None)
    made.include_router(knowledge.router)
    made.include_router(routes.router)
    made.add_api_route(EXPLAIN, explained(CHAT, COMPLETION), methods=["POST"])
    return made


def answered(blending: Blending, source: str | None = None) -> None:
    """As an answer to a prompt with the known text is noted."""
    plan = blending.library.plan(f"Of batteries.\n\n{TEXT.strip()}\n\nHow long?")
    (span,) = plan.spans
    end = span[1] + span[2]
    at = f"0-{span[1] - 1},{span[1] + 3},{end}-"
    report = BlendReport(cached=span[2], fresh=len(plan.token_ids) - span[2], recomputed=1, computed_at=at)
    evidence = PlannedPrompt(plan, Recipe("store", plan.spans), None, None).evidence(report, 0)
    facts = report.facts() | {"documents": evidence.documents, "computed_at": evidence.computed_at}
    if source:
        facts["documents"] = [{**row, "source": source} for row in evidence.documents]
    counts = {name: getattr(evidence, name) for name in ("prompt", "mode", "reused", "recomputed", "fresh")}
    blending.latest.add(counts | {"prefix": 0, "plain": None}, facts)


# -- the files ----------------------------------------------------------------------------------------------


def test_page_is_there_without_a_key_and_under_a_strict_policy(tenants: Tenants) -> None:
    client = TestClient(app(tenants, locked=True))
    for path, kind in ((PAGE, "html"), (f"{PAGE}/ui.css", "css"), (f"{PAGE}/ui.js", "javascript")):
        answer = client.get(path)
        assert answer.status_code == 200 and kind in answer.headers["content-type"]
        said = answer.headers["content-security-policy"].split("; ")
        policy = dict(one.split(" ", 1) for one in said)
        assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
        assert "unsafe" not in str(policy)
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert client.post(path).status_code == 401
    for path in (f"{PAGE}/", f"{PAGE}/ui.html", f"{PAGE}/../keys", "/v1/kb/stats", "/v1/kb/prompts"):
        assert client.get(path).status_code == 401, path


def test_page_holds_nothing_that_its_policy_forbids(tenants: Tenants) -> None:
    client = TestClient(app(tenants))
    html = client.get(PAGE).text
    assert re.findall(r"<script(.*?)>(.*?)</script>", html) == [(' src="ui/ui.js" defer', "")]
    assert not re.search(r"<style|style=|\son\w+=|https?:|//", html)
    script = client.get(f"{PAGE}/ui.js").text
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|localStorage", script)


# -- collections --------------------------------------------------------------------------------------------


def test_collections_come_in_pages_with_what_is_kept_of_each(tenants: Tenants) -> None:
    client, blending = TestClient(app(tenants)), tenants[""]
    keep(blending, "handbook", leave="In writing. " * 9, pay="Monthly. " * 9)
    keep(blending, "hand", cream="Twice a day. " * 9)
    keep(blending, "hand!", again="Twice a day. " * 9)
    blending.library.texts.register({"page.md": ["Of an index in the same folder. " * 9]})
    found = client.get("/v1/kb/collections").json()
    assert [one["name"] for one in found["collections"]] == ["cities", "hand", "hand!", "handbook"]
    assert found["total"] == 4
    handbook = found["collections"][-1]
    assert (handbook["documents"], handbook["chunks"], handbook["pending"], handbook["ready"]) == (2, 2, 2, 0)
    first = client.get("/v1/kb/collections", params={"prefix": "hand", "limit": 2}).json()
    assert [one["name"] for one in first["collections"]] == ["hand", "hand!"] and first["total"] == 3
    rest = client.get("/v1/kb/collections", params={"prefix": "hand", "after": "hand!"}).json()
    assert [one["name"] for one in rest["collections"]] == ["handbook"]
    for refused in ({"limit": 0}, {"limit": 1001}, {"start": "a"}):
        assert client.get("/v1/kb/collections", params=refused).status_code in (400, 422)


def many(blending: Blending, number: int) -> None:
    """Collections of one document each, which is the same for all."""
    catalogue = blending.library.catalogue
    (key,) = catalogue.known()
    with catalogue._transaction() as db:
        rows = [(f"of-{n:05}\x1fbattery", key) for n in range(number)]
        db.executemany("INSERT INTO owners VALUES (?, ?)", rows)


def test_ten_thousand_collections_are_listed_in_a_moment(tenants: Tenants) -> None:
    many(tenants[""], 10_000)
    client, begun = TestClient(app(tenants)), time.monotonic()
    found = client.get("/v1/kb/collections", params={"after": "of-04999"}).json()
    assert time.monotonic() - begun < 1, "some 10 ms on two cores"
    assert (len(found["collections"]), found["total"]) == (100, 10_001)
    assert found["collections"][0]["name"] == "of-05000"


# -- the latest prompts -------------------------------------------------------------------------------------


def test_latest_prompts_are_the_tenants_own_and_without_texts(tenants: Tenants) -> None:
    client = TestClient(app(tenants, locked=True))
    answered(tenants[""])
    found = client.get("/v1/kb/prompts", headers=bearer("ours"))
    (prompt,) = found.json()["prompts"]
    assert prompt["prompt"] == prompt["reused"] + prompt["recomputed"] + prompt["fresh"]
    assert [row["tokens"] for row in prompt["documents"]] == [prompt["reused"] + prompt["recomputed"]]
    for text in ("warranty", "How long", "Of batteries"):
        assert text not in found.text
    assert client.get("/v1/kb/prompts", headers=bearer("theirs")).json() == {"prompts": []}
    assert client.get("/v1/kb/prompts", headers=bearer("asks")).status_code == 403
    strip = client.get("/v1/kb/prompts", headers=bearer("ours") | HTML)
    assert "<svg" in strip.text and "1 repaired" in strip.text
    assert "script-src 'self'" in strip.headers["content-security-policy"]
    assert strip.headers["cache-control"] == "no-store"


def test_latest_prompts_are_few_however_many_documents_they_hold() -> None:
    latest = LatestPrompts()
    row = {"kind": "cached", "source": "a", "tokens": 9, "reused": 9, "reason": "", "start": 0}
    row |= {"chunk_key": "k", "text": "secret"}
    for number in range(2 * MOST_PROMPTS):
        latest.add({"prompt": number}, {"documents": [row]})
    assert [one["prompt"] for one in latest.all()] == [*range(2 * MOST_PROMPTS - 1, MOST_PROMPTS - 1, -1)]
    for number in range(3):
        latest.add({"prompt": number}, {"documents": [row] * 4_000, "computed_at": "1," * 1_000})
    assert [one["prompt"] for one in latest.all()] == [2], "the latest, whatever it takes"
    assert "secret" not in str(latest.all())


def test_words_of_a_document_that_has_no_name_are_not_kept() -> None:
    latest = LatestPrompts()
    row = {"kind": "not found", "source": "The first words of", "tokens": 9, "reused": 0, "start": None}
    row |= {"reason": "not ingested", "chunk_key": None, "text": ""}
    latest.add({"prompt": 1}, {"documents": [row]})
    assert "first words" not in str(latest.all()) and "not ingested" in str(latest.all())


# -- explain ------------------------------------------------------------------------------------------------


def test_request_is_explained_as_a_strip_to_who_takes_html(tenants: Tenants) -> None:
    client = TestClient(app(tenants, locked=True))
    messages = [{"role": "user", "content": f"{TEXT}\n\nHow long?"}]
    body: dict[str, Any] = {"model": "model", "messages": messages}
    for key, named in (("ours", True), ("asks", False)):
        answer = client.post(EXPLAIN, json=body, headers=bearer(key) | HTML)
        assert answer.status_code == 200 and "<svg" in answer.text, answer.text
        assert (">power</td>" in answer.text) == named
        assert client.post(EXPLAIN, json=body, headers=bearer(key)).json()["rows"]
    body["blendrag"] = {"documents": ["Nobody has told the server of this. " * 9]}
    answer = client.post(EXPLAIN, json=body, headers=bearer("ours") | HTML)
    assert "not ingested, and not in the prompt" in answer.text


# -- in a browser -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture
def served(tenants: Tenants) -> Iterator[Callable[..., str]]:
    """The page's URL."""
    begun: list[tuple[uvicorn.Server, threading.Thread]] = []

    def serve(**options: Any) -> str:
        config = uvicorn.Config(app(tenants, **options), port=0, log_level="error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        begun.append((server, thread))
        thread.start()
        until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}{PAGE}"

    yield serve
    for server, thread in begun:
        server.should_exit = True
        thread.join(20)


def test_page_shows_what_is_kept_and_what_became_of_prompts(
    tenants: Tenants, served: Callable[..., str], window: Browser
) -> None:
    answered(tenants[""])
    window.open(served())
    window.wait(lambda: "repaired" in window.text("#prompts") and "1 of 1" in window.text("#find"))
    assert "model, 512 tokens" in window.text("#model")
    assert "cities\t1\t1\t0\t1\t0\t80\t0" in window.text("#collections")
    assert window.run("return document.querySelectorAll('#prompts svg rect title').length") >= 3
    window.type("#explain textarea", f"{TEXT}\n\nHow long?")
    window.type("#explain textarea:nth-of-type(2)", "Nobody has told the server of this.")
    window.click("#explain button")
    window.wait(lambda: "not ingested, and not in the prompt" in window.text("#explained"))
    assert "its KV is not stored" in window.text("#explained"), "why nothing is reused"
    window.type("#explain textarea", '{"messages": []}')
    window.click("#explain button")
    window.wait(lambda: "refuses the request" in window.text("#explained"))
    window.type("#explain textarea", '{"prompt": "How long?", "blendrag": {"ratio": 2}}')
    window.click("#explain button")
    window.wait(lambda: "unknown field 'ratio'" in window.text("#problem"))


def test_key_is_typed_in_and_is_in_no_address(
    tenants: Tenants, served: Callable[..., str], window: Browser
) -> None:
    answered(tenants[""])
    window.open(served(locked=True))
    window.wait(lambda: "needs a key" in window.text("#problem"))
    window.type("#key input", "ours")
    window.click("#key button")
    window.wait(lambda: "repaired" in window.text("#prompts"))
    assert window.text("#problem") == ""
    addresses = window.run(
        "return [location.href, ...performance.getEntriesByType('resource').map((one) => one.name)]"
    )
    assert len(addresses) > 5 and not any("ours" in address for address in addresses)
    assert window.run("return localStorage.length") == 0 and window.run("return document.cookie") == ""
    window.type("#key input", "asks")
    window.click("#key button")
    window.wait(lambda: "has not the right" in window.text("#prompts"))
    assert "has not the right" in window.text("#collections")
    window.run("sessionStorage.clear()")


def test_hostile_names_are_shown_as_text(
    tenants: Tenants, served: Callable[..., str], window: Browser
) -> None:
    keep(tenants[""], HOSTILE, **{HOSTILE: "Of nothing in particular. " * 9})
    answered(tenants[""], HOSTILE)
    window.open(served())
    window.wait(lambda: "<script>" in window.text("#collections") and "repaired" in window.text("#prompts"))
    window.type("#explain textarea", "Of nothing in particular. " * 9)
    window.click("#explain button")
    window.wait(lambda: "<script>" in window.text("#explained"))
    assert "<img src=x" in window.run("return document.querySelector('#prompts').textContent")
    assert window.run("return typeof hacked + document.images.length") == "undefined0"
    assert window.run("return document.querySelectorAll('main script').length") == 0


def test_ten_thousand_collections_can_be_looked_through(
    tenants: Tenants, served: Callable[..., str], window: Browser
) -> None:
    many(tenants[""], 10_000)
    window.open(served())
    window.wait(lambda: "100 of 10,001" in window.text("#find"))
    window.click("#more")
    window.wait(lambda: "of-00100" in window.text("#collections"))
    window.type("#find input", "of-0999")
    window.click("#find button")
    window.wait(lambda: "10 of 10" in window.text("#find"))
    assert window.run("return document.querySelector('#more').hidden")
