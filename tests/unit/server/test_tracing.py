"""Spans of a request, as OpenTelemetry's own provider records them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from fastapi import Request
from fastapi.responses import JSONResponse
from fastapi.testclient import TestClient
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from blendrag.remote.http import Server
from blendrag.server.blending import BlendFields
from blendrag.server.completions import blended, body_of
from blendrag.server.tracing import Spans
from engineless import TEXT, Tenants, app_of, tenants_without_engine

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY = {"model": "model", "messages": [{"role": "user", "content": f"{TEXT}\n\nHow long?"}]}
ANSWER = {"choices": [], "usage": {"prompt_tokens": 99, "completion_tokens": 7, "total_tokens": 106}}


tenants = pytest.fixture(tenants_without_engine)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


def served(tenants: Tenants, told: list[str | None], status: int = 200) -> TestClient:
    """vLLM's route is one that notes what caller it is told of."""

    async def stock(request: ChatCompletionRequest, raw_request: Request) -> JSONResponse:
        told.append(raw_request.headers.get("traceparent"))
        return JSONResponse(ANSWER, status)

    app = app_of(tenants)
    app.add_api_route("/chat", blended(stock, body_of(stock)), methods=["POST"])
    return TestClient(app)


def named(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_request_is_in_its_callers_trace_and_vllms_span_below_it(
    tenants: Tenants, recorded: InMemorySpanExporter
) -> None:
    told: list[str | None] = []
    answer = served(tenants, told).post("/chat", json=BODY, headers={"traceparent": CALLER})
    assert answer.status_code == 200
    spans = named(recorded)
    own, plan = spans["chat model"], spans["blendrag.plan"]
    assert own.parent is not None and f"{own.parent.span_id:x}" == CALLER.split("-")[2]
    assert own.context is not None and f"{own.context.trace_id:032x}" == CALLER.split("-")[1]
    assert plan.parent == own.context
    assert told == [f"00-{own.context.trace_id:032x}-{own.context.span_id:016x}-01"]
    attributes = dict(own.attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.usage.output_tokens"] == 7
    assert attributes["gen_ai.usage.input_tokens"] == attributes["blendrag.fresh"]
    assert "fewer than min_cached_tokens" in str(attributes["blendrag.plain"])


@pytest.mark.parametrize(("body", "status"), [(BODY, 500), (BODY | {"kv_transfer_params": {"a": 1}}, 200)])
def test_request_that_fails_ends_its_span_with_an_error(
    tenants: Tenants, recorded: InMemorySpanExporter, body: dict[str, Any], status: int
) -> None:
    assert served(tenants, [], status).post("/chat", json=body).status_code in (400, 500)
    assert not named(recorded)["chat model"].status.is_ok


def test_server_that_records_nothing_leaves_requests_as_they_are(tenants: Tenants) -> None:
    told: list[str | None] = []
    served(tenants, told).post("/chat", json=BODY, headers={"traceparent": CALLER})
    assert told == [CALLER]


@pytest.mark.parametrize("asked", [True, False])
def test_parts_of_a_blend_are_spans_of_the_time_they_took(
    recorded: InMemorySpanExporter, asked: bool
) -> None:
    scope = {"type": "http", "headers": [(b"traceparent", CALLER.encode())]}
    spans, now = Spans.of(Request(scope), "chat", "model"), time.perf_counter()
    events = [
        ("open", "records", now - 5, now - 4), ("load", "layers 0-3", now - 4, now - 2),
        ("compute", "layer 0", now - 3, now - 2), ("select", "layer 1", now - 2, now - 1.5),
        ("compute", "layer 1", now - 2, now - 1),
    ]  # fmt: skip

    async def evidence(answer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"prompt": 9, "reused": 5, "prefix": 1, "mode": "blended"}, {"trace": events}

    fields = BlendFields(trace=asked)
    assert spans.traced(fields).trace
    _, facts = asyncio.run(spans.around(evidence, fields)({}))
    assert facts["trace"] == (events if asked else ())
    found = named(recorded)
    for part, begin, seconds in (("load", 5, 3), ("select", 2, 0.5), ("recompute", 3, 2)):
        span = found[f"blendrag.{part}"]
        assert span.start_time and span.end_time
        assert (span.end_time - span.start_time) / 1e9 == pytest.approx(seconds, abs=0.001)
        assert time.time() - span.start_time / 1e9 == pytest.approx(begin, abs=1)
    assert dict(found["chat model"].attributes or {})["gen_ai.usage.cache_read.input_tokens"] == 6


def test_client_tells_the_server_of_its_span(recorded: InMemorySpanExporter) -> None:
    server = Server("http://127.0.0.1:1", headers={"x-team": "ours"})
    assert "traceparent" not in server._asked("v1/models")["headers"]
    with trace.get_tracer("test").start_as_current_span("ask") as span:
        headers = server._asked("v1/models")["headers"]
    assert f"{span.get_span_context().span_id:016x}" in headers["traceparent"]
    assert headers["x-team"] == "ours"
