"""A server's spans, as a collector gets them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from served import TEXTS, Server, text_of
from waiting import until

pytestmark = [pytest.mark.own_engine, pytest.mark.nightly, pytest.mark.xdist_group("server-tracing")]

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def collector() -> Iterator[tuple[int, dict[str, Span]]]:
    """A port that takes OTLP over HTTP, and the spans of the caller's trace that came, by name."""
    spans: dict[str, Span] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            sent = ExportTraceServiceRequest.FromString(body)
            each = (span for of in sent.resource_spans for scope in of.scope_spans for span in scope.spans)
            spans.update({span.name: span for span in each if span.trace_id.hex() == CALLER.split("-")[1]})
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    yield listener.server_port, spans
    listener.shutdown()


def test_spans_of_blend_and_engine_are_below_the_requests(
    collector: tuple[int, dict[str, Span]],
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port, spans = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    server = Server(tmp_path / "kv", "--otlp-traces-endpoint", f"http://127.0.0.1:{port}/v1/traces").wait()
    try:
        server.put(TEXTS)
        server.client.headers["traceparent"] = CALLER
        answer = server.ask(blendrag={"selector": "hkvd", "evidence": True})
        assert text_of(answer) and not answer.json()["blendrag"]["trace"], "nobody has asked for it"
        parts = {f"blendrag.{part}" for part in ("plan", "load", "select", "recompute")}
        wanted = parts | {"llm_request"}
        until(lambda: wanted <= spans.keys(), said=spans.keys())  # vLLM sends every few seconds
    finally:
        server.end()
    (own,) = (span for name, span in spans.items() if name.startswith("chat "))
    assert own.parent_span_id.hex() == CALLER.split("-")[2]
    for name in wanted:
        assert spans[name].parent_span_id == own.span_id, name
    for name in parts:
        part = spans[name]
        assert own.start_time_unix_nano <= part.start_time_unix_nano <= part.end_time_unix_nano, name
        assert part.end_time_unix_nano <= own.end_time_unix_nano, name
