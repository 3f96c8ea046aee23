"""Traces that follow each other: what a cache sees whose workload changes from one moment to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blendrag.errors import ConfigError
from blendrag.lab.replay.events import finished
from blendrag.lab.replay.request import Request, Trace
from blendrag.lab.replay.source import Source

_PAUSE_S = 1.0
_SEEDS = 1_000  # apart: a file that is named twice is drawn from anew


def in_turn(sources: Sequence[Source]) -> Source:
    """One source for traces that are made of one of each. Sources of one are left as they are."""
    if len(sources) == 1:
        return sources[0]

    def parts(seed: int) -> list[Trace]:
        return [source.trace(seed + _SEEDS * place) for place, source in enumerate(sources)]

    def forecasts(trace: Trace) -> list[float] | None:
        found: list[float] = []
        for source, part in zip(sources, _split(trace), strict=True):
            told = source.forecasts(part)
            if told is None:
                return None
            found.extend(told)
        return found

    return Source(
        lambda seed: joined(parts(seed)),
        generated=any(source.generated for source in sources),
        forecasts=forecasts,
        notes=tuple(dict.fromkeys(note for source in sources for note in source.notes)),
    )


def joined(traces: Sequence[Trace]) -> Trace:
    """One trace after the other. Each has blocks of its own; retrieved chunks of one corpus stay the same.

    Raises ConfigError for traces that no single cache could serve: of prefixes and of chunks, or sizes in
    blocks and in tokens.
    """
    first = traces[0]
    requests: list[Request] = []
    starts = []
    begin = 0.0
    for place, trace in enumerate(traces):
        if (trace.prefix, trace.unit) != (first.prefix, first.unit):
            raise ConfigError(
                f"{_kind(first)} and {_kind(trace)} are not of one cache: replay them one by one"
            )
        starts.append(len(requests))
        space = f"{place}" if trace.prefix else trace.name
        requests += [_moved(request, begin, space) for request in trace.requests]
        begin = max((finished(request) for request in requests), default=begin) + _PAUSE_S
    name = ", ".join(trace.name for trace in traces)
    return replace(first, name=name, requests=requests, starts=tuple(starts), popularity={})


def _split(trace: Trace) -> list[Trace]:
    ends = [*trace.starts[1:], len(trace.requests)]
    return [
        replace(trace, requests=trace.requests[start:end])
        for start, end in zip(trace.starts, ends, strict=True)
    ]


def _kind(trace: Trace) -> str:
    return f"{trace.name} ({'prefixes' if trace.prefix else 'chunks'}, sizes in {trace.unit})"


def _moved(request: Request, begin: float, space: str) -> Request:
    return replace(
        request,
        at=begin + request.at,
        finished=None if request.finished is None else begin + request.finished,
        keys=tuple(f"{space}/{key}" for key in request.keys),
        conversation=None if request.conversation is None else f"{space}/{request.conversation}",
    )
