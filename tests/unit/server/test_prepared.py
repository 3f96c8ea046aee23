"""What becomes of a request between vLLM's route and its engine. No engine is started here."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from fastapi.testclient import TestClient
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.entrypoints.anthropic.api_router import create_messages
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

from blendrag.engine.wire.prefixes import PrefixPath, read_path
from blendrag.engine.wire.recipe import is_sealed
from blendrag.engine.worker import metrics
from blendrag.engine.worker.metrics import BlendMetrics
from blendrag.errors import ConfigError, EngineError
from blendrag.lab.eviction.trace import read_log
from blendrag.server.blending import Blended, Blending
from blendrag.server.completions import _evidence, body_of, explained
from blendrag.server.keys import ASK, INGEST, Key
from blendrag.serving.library import Library
from blendrag.serving.repeats import OWNERS
from blendrag.serving.session import EngineSession
from blendrag.settings import Settings
from engine_facts import FACTS
from engineless import CHAT, COMPLETION, TEXT, Renderer, app_of

USAGE = {"usage": {"prompt_tokens": 99, "completion_tokens": 7}}

Open = Callable[..., Blending]


@pytest.fixture
def begin(tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Tenants of a server that knows one text."""
    monkeypatch.setenv("BLENDRAG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(EngineSession, "store", Mock(id="opened"))
    begun: list[Blending] = []

    def one(repeats_bytes: int = 0, **options: Any) -> Blending:
        settings = Settings.load(max_model_len=512, model=str(model_dir), embedder="./none", **options)
        library = Library(tmp_path / f"kv{len(begun)}", settings, shared=True, repeats_bytes=repeats_bytes)
        library.texts.register({"a": [TEXT]})
        engine: Any = SimpleNamespace(blends=True, facts=FACTS, max_model_len=512)
        monkeypatch.setattr(library.session, "start", lambda progress=None: engine)
        monkeypatch.setattr(library.session, "open", lambda progress=None: library.session.store)
        library.start()
        begun.append(Blending(library, settings, engine, "model", "seal"))
        return begun[-1]

    yield one
    for each in begun:
        each.library.close()


def state(blending: Blending) -> Any:
    """That of vLLM's app."""
    return SimpleNamespace(online_renderer=Renderer(blending.library.tokenizer))


def prepared(
    blending: Blending, kind: Any = CHAT, question: str = "How long?", **more: Any
) -> tuple[Any, Blended]:
    """vLLM's request, answered, and what was planned of it."""
    content = f"{TEXT}\n\n{question}"
    request = kind.model_validate(
        {"messages": [{"role": "user", "content": content}], "prompt": content, "max_tokens": 8, **more}
    )

    async def answered() -> Blended:
        about = await blending.prepare(request, request.blendrag, state(blending))
        await blending.evidence(about, USAGE)
        return about

    return request, asyncio.run(answered())


def asked(blending: Blending, kind: Any = CHAT, question: str = "How long?", **more: Any) -> Any:
    return prepared(blending, kind, question, **more)[0]


def extra(request: Any) -> dict[str, Any]:
    """What reaches vLLM's engine beside the usual."""
    return request.to_sampling_params(8, {}).extra_args or {}


@pytest.mark.parametrize("kind", [CHAT, COMPLETION], ids=["chat", "completion"])
def test_conversation_of_a_request_reaches_the_forecaster(begin: Open, tmp_path: Path, kind: Any) -> None:
    blending = begin(outcome_log=True)
    asked(blending, kind, blendrag={"conversation": "ada"})
    asked(blending, kind, "How far?", blendrag={"conversation": "ada"})
    asked(blending, kind, "How far?", blendrag={"conversation": "eve"})
    forecaster = blending.library.sidecars.forecaster
    assert forecaster is not None and forecaster.counts.asked == 3
    blending.close()
    first, second, other = read_log(tmp_path / "cache" / "evictor" / "prompts.sqlite").requests
    assert first.conversation == second.conversation != other.conversation


def test_prompts_of_a_client_that_keeps_to_itself_add_nothing_to_what_is_kept(begin: Open) -> None:
    blending = begin(repeats_bytes=1 << 30)
    page = "".join(f"In {year} all was well.\n" for year in range(9, 40))

    def say(number: int, **more: Any) -> int:
        content = f"Number {number * 7919}, of {page} What of it?"
        asked(blending, messages=[{"role": "user", "content": content}], blendrag={}, **more)
        repeats = blending.library.repeats
        assert repeats is not None
        repeats.wait()
        return len(blending.library.catalogue.kept(OWNERS))

    assert [say(number, cache_salt="mine") for number in range(4)] == [0] * 4
    assert [say(number) for number in range(4, 7)] == [0, 1, 1]


@pytest.mark.parametrize(
    ("error", "status"), [(EngineError("the engine is dead"), 500), (ConfigError("no such thing"), 400)]
)
def test_dead_engine_is_a_fault_of_the_server_that_is_asked_for_an_explanation(
    begin: Open, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    blending = begin()
    monkeypatch.setattr(blending.library, "recipe", Mock(side_effect=error))
    app = app_of({"": blending})
    app.add_api_route("/explain", explained(CHAT, COMPLETION), methods=["POST"])
    answer = TestClient(app).post("/explain", json={"prompt": TEXT})
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, str(error))


def test_body_with_a_system_beside_its_messages_is_explained_as_anthropics(begin: Open) -> None:
    blending = begin()
    app = app_of({"": blending})
    convert = AnthropicServingMessages.to_chat_completion_request
    app.state.anthropic_serving_messages = SimpleNamespace(
        to_chat_completion_request=convert, _merge_inline_system=False
    )
    app.add_api_route("/explain", explained(CHAT, COMPLETION, body_of(create_messages)), methods=["POST"])
    said = {"role": "user", "content": TEXT}
    body: dict[str, Any] = {"model": "model", "max_tokens": 8, "messages": [said]}
    for more in ({}, {"system": [{"type": "text", "text": "Be brief."}]}):
        found = TestClient(app).post("/explain", json=body | more).json()
        assert found["rows"] and ("Be brief." in found["text"]) == bool(more)
    missing = TestClient(app).post("/explain", json={"system": "Be brief.", "messages": [said]})
    assert missing.status_code == 400 and "AnthropicMessagesRequest.max_tokens" in missing.text


def unplanned() -> dict[str, float]:
    """What was counted, by reason."""
    (family,) = (one for one in REGISTRY.collect() if one.name == "blendrag_unplanned")
    return {
        one.labels["reason"]: one.value for one in family.samples if one.value and one.name.endswith("_total")
    }


@pytest.fixture
def counted() -> Iterator[Callable[[], dict[str, float]]]:
    config = SimpleNamespace(kv_transfer_config=None)
    BlendMetrics(config, {one: one for one in (Counter, Gauge, Histogram)}, ["engine"], {3: ["3"]})
    yield unplanned
    metrics._unregister()


def other_text(blending: Blending) -> Callable[..., Any]:
    """Plans whose ids are not those of the prompt."""
    plan = blending.library.plan
    return lambda text, documents: plan(f"{text} And more.", documents)


def failing(_: Blending) -> Callable[..., Any]:
    return Mock(side_effect=RuntimeError("no plan"))


@pytest.mark.parametrize("kind", [CHAT, COMPLETION], ids=["chat", "completion"])
@pytest.mark.parametrize(
    ("broken", "reason", "said"),
    [(other_text, "text", "cannot be tokenised apart"), (failing, "error", "planning failed: no plan")],
)
def test_prompt_that_cannot_be_planned_is_unchanged_and_counted(
    begin: Open,
    monkeypatch: pytest.MonkeyPatch,
    counted: Callable[[], dict[str, float]],
    kind: Any,
    broken: Callable[[Blending], Any],
    reason: str,
    said: str,
) -> None:
    blending = begin(namespace="acme")
    request, about = prepared(blending, kind, blendrag={})
    assert about.prompt is not None and counted() == {}
    monkeypatch.setattr(blending.library, "plan", broken(blending))
    request, about = prepared(blending, kind, blendrag={})
    assert about.prompt is None and said in str(about.plain)
    assert (request.kv_transfer_params, request.cache_salt) == (None, "acme:")
    assert kind is CHAT or isinstance(request.prompt, str)
    assert counted() == {reason: 1}


def test_image_that_another_tenant_may_have_named_is_refused(begin: Open) -> None:
    part = {"type": "image_url", "image_url": {"url": "x"}, "uuid": "theirs"}
    messages = [{"role": "user", "content": [part]}]
    assert prepared(begin(), messages=messages, blendrag={})[1].unplanned == "request"
    with pytest.raises(ConfigError, match="leave out the uuid"):
        asked(begin(namespace="acme"), messages=messages, blendrag={})


def page(number: int, sentences: int = 58) -> str:
    """Of some 500 tokens."""
    said = "Receipts are handed in within ten days. " * sentences
    return f"Handbook of the company, page {number:06d}. {said}"


def calls(work: Callable[[], Any]) -> int:
    """Of functions, Python's and C's, in this thread."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_planning_takes_no_longer_the_more_texts_are_known(begin: Open) -> None:
    """What it prints is in docs/results.md: of a request, all that is done but the answer."""
    blending, known, count = begin(), 20, 10_000
    library, question = blending.library, "How long?"
    pages = "\n\n".join(page(number) for number in range(6))
    prompt = f"{pages}\n\n{question}"

    def plan() -> None:
        library.recipe(library.plan(prompt), blending.settings.blending)

    library.texts.register({str(number): [page(number)] for number in range(known)})
    plan()
    few = calls(plan)
    library.texts.register({str(number): [page(number, 4)] for number in range(known, count)})
    plan()
    assert calls(plan) < 1.1 * few
    times = []
    for _ in range(50):
        begun = time.perf_counter()
        _, about = prepared(blending, COMPLETION, prompt=prompt, blendrag={})
        times.append(1e3 * (time.perf_counter() - begun))
    assert about.prompt is not None and about.unplanned is None
    tokens, middle = len(about.prompt.plan.token_ids), sorted(times)[len(times) // 2]
    print(f"{count} texts, {tokens} tokens: {middle:.1f} ms, {min(times):.1f} at best")


PATH = PrefixPath("tree", (("root", 4), ("document", 60)), held=1, kept=2)


@pytest.mark.parametrize(("namespace", "salt"), [("", None), ("acme", "acme:")])
def test_scheduler_takes_a_path_of_its_own_server(
    begin: Open, monkeypatch: pytest.MonkeyPatch, namespace: str, salt: str | None
) -> None:
    blending = begin(namespace=namespace)
    monkeypatch.setattr(blending.library.sidecars, "path", lambda plan, recipe: (PATH, None))
    blending.engine.acall = AsyncMock(return_value=None)  # type: ignore[method-assign]
    request = asked(blending, COMPLETION, blendrag={})
    params = extra(request)["kv_transfer_params"]
    assert request.cache_salt == salt
    assert is_sealed(params, salt, "seal") and not is_sealed(params, "other:", "seal")
    assert read_path(params, 99) == PATH


def test_client_with_a_salt_takes_no_exact_prefixes_of_others(
    begin: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    blending = begin()
    monkeypatch.setattr(blending.library.sidecars, "path", lambda plan, recipe: pytest.fail("it is shared"))
    request = asked(blending, COMPLETION, blendrag={}, cache_salt="mine")
    assert request.cache_salt.startswith("~") and extra(request) == {}


@pytest.mark.parametrize(("rights", "kept"), [({ASK}, 0), ({ASK, INGEST}, 1)], ids=["ask", "ingest"])
def test_marked_text_is_kept_for_who_may_ingest(begin: Open, rights: set[str], kept: int) -> None:
    blending = begin(repeats_bytes=1 << 30)
    message = {"role": "user", "content": page(1)[:600], "cache_control": {"type": "ephemeral"}}
    body = {"messages": [message]}
    request = CHAT.model_validate(body)

    async def rows() -> list[Any]:
        about = await blending.prepare(request, request.blendrag, state(blending))
        assert about.prompt is not None, about.plain
        return (await _evidence(blending, about, Key("", frozenset(rights)), USAGE))[1]["documents"]

    assert [row["reason"] for row in asyncio.run(rows()) if row["kind"] == "not found"] == ["not ingested"]
    assert blending.library.repeats is not None
    blending.library.repeats.wait()
    assert len(blending.library.catalogue.kept(OWNERS)) == kept
