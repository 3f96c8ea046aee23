"""OpenTelemetry spans of a request that vLLM's tracing (``--otlp-traces-endpoint``) samples."""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from fastapi import Request

from blendrag.server.blending import BlendFields

if TYPE_CHECKING:
    from opentelemetry.trace import Span

Told = tuple[dict[str, Any], dict[str, Any]]
"""Evidence: counts of tokens, and what became of each document."""
Evidence = Callable[[dict[str, Any]], Awaitable[Told]]

# The spans of a blend, by the lanes of its trace.
_PARTS = {"load": ("open", "load"), "select": ("select",), "recompute": ("compute",)}


class Spans:
    """The spans of one request: its own, in the caller's trace, and below it vLLM's and those of its parts.

    As a context, around what comes before the answer, it notes what is raised. Does nothing if no span is
    recorded.
    """

    def __init__(self, span: Span | None = None) -> None:
        self._span, self._begun = span, time.time_ns()

    @classmethod
    def of(cls, request: Request, operation: str, model: str) -> Spans:
        """Begin a request's span. operation, model: as the conventions for generative AI name them."""
        try:
            from opentelemetry import propagate, trace
        except ImportError:
            return cls()
        about = {"gen_ai.operation.name": operation, "gen_ai.request.model": model}
        span = trace.get_tracer("blendrag").start_span(
            f"{operation} {model}",
            propagate.extract(request.headers),
            trace.SpanKind.SERVER,
            {**about, "gen_ai.provider.name": "blendrag"},
        )
        return cls(span if span.is_recording() else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._fail(str(error) or type(error).__name__)

    def traced(self, fields: BlendFields) -> BlendFields:
        """Return the request's fields, with the trace that spans are made of."""
        return fields if self._span is None else fields.model_copy(update={"trace": True})

    def inside(self, request: Request) -> Request:
        """Return the request as one of this span's, so that vLLM's own comes below it."""
        if self._span is None:
            return request
        from opentelemetry import propagate, trace

        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(self._span))
        ours = [(name.encode(), value.encode()) for name, value in carrier.items()]
        others = [pair for pair in request.scope["headers"] if pair[0].decode("latin-1") not in carrier]
        return Request({**request.scope, "headers": [*others, *ours]}, request.receive)

    def planned(self) -> None:
        """Note that the prompt is planned, which is the first thing done."""
        self._part("plan", self._begun, time.time_ns())

    def answered(self, status: int) -> None:
        """Note the status of vLLM's answer."""
        if status != 200:
            self._fail(f"status {status}")

    def around(self, evidence: Evidence, fields: BlendFields) -> Evidence:
        """Return what tells the evidence, and ends the span with it; a trace only if the client wants it."""
        if self._span is None:
            return evidence

        async def told(answer: dict[str, Any]) -> Told:
            counts, facts = await evidence(answer)
            self._end(counts, facts, answer)
            return counts, facts if fields.trace else {**facts, "trace": ()}

        return told

    def end(self) -> None:
        """End the request's span, if it has not ended."""
        if self._span is not None:
            self._span.end()
        self._span = None

    async def closing(self, chunks: AsyncIterable[Any]) -> AsyncIterator[Any]:
        """Yield a stream, and end the span with it, whatever ends it."""
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            self.end()

    def _end(self, counts: Mapping[str, Any], facts: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        now = time.time_ns() - round(1e9 * time.perf_counter())  # one clock for all processes of a machine
        for part, lanes in _PARTS.items():
            of_part = [event for event in facts.get("trace", ()) if event[0] in lanes]
            if of_part:
                begin = min(begin for _, _, begin, _ in of_part)
                end = max(end for _, _, _, end in of_part)
                self._part(part, now + round(1e9 * begin), now + round(1e9 * end))
        told = {
            "gen_ai.usage.input_tokens": counts.get("prompt"),
            "gen_ai.usage.output_tokens": (answer.get("usage") or {}).get("completion_tokens"),
            "gen_ai.usage.cache_read.input_tokens": counts.get("reused", 0) + counts.get("prefix", 0),
            **{f"blendrag.{name}": counts.get(name) for name in ("mode", "recomputed", "fresh", "plain")},
            "blendrag.decision": facts.get("decision") or None,
        }
        if self._span is not None:
            self._span.set_attributes({name: value for name, value in told.items() if value is not None})
        self.end()

    def _fail(self, message: str) -> None:
        if self._span is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, message))
        self.end()

    def _part(self, name: str, begin_ns: int, end_ns: int) -> None:
        if self._span is not None:
            from opentelemetry import trace

            context = trace.set_span_in_context(self._span)
            tracer = trace.get_tracer("blendrag")
            tracer.start_span(f"blendrag.{name}", context, start_time=begin_ns).end(end_ns)
