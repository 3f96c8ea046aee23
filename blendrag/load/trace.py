"""The times of loading and computing, for a plot of both (CacheBlend figure 10)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blendrag.errors import ConfigError

Event = tuple[str, str, float, float]  # lane, name, begin and end in seconds on one clock


class Trace:
    """The events of one request, from several threads. If off, it costs a comparison per event."""

    def __init__(self, on: bool = True) -> None:
        self.on = on
        self.events: list[Event] = []

    def add(self, lane: str, name: str, begin: float) -> None:
        """Add an event that began at ``begin`` (``time.perf_counter``) and ends now."""
        if self.on:
            self.events.append((lane, name, begin, time.perf_counter()))

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(lane, name, begin)


def chrome_trace(requests: Mapping[str, Sequence[Event]]) -> dict[str, Any]:
    """Return requests, by name, in Chrome's trace format (chrome://tracing, Perfetto): one below the other,
    each from its own first event on, in microseconds."""
    entries: list[dict[str, Any]] = []
    for process, (request, events) in enumerate(requests.items()):
        entries.append(_name("process_name", process, 0, request))
        zero = min((begin for _, _, begin, _ in events), default=0.0)
        lanes = {lane: number for number, lane in enumerate(dict.fromkeys(lane for lane, *_ in events))}
        entries += [_name("thread_name", process, number, lane) for lane, number in lanes.items()]
        for lane, name, begin, end in events:
            where = {"pid": process, "tid": lanes[lane]}
            times = {"ts": round(1e6 * (begin - zero), 1), "dur": round(1e6 * (end - begin), 1)}
            entries.append({"ph": "X", "name": name, "cat": lane, **where, **times})
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def _name(what: str, process: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": lane, "args": {"name": name}}


def write_trace(requests: Mapping[str, Sequence[Event]], path: Path) -> None:
    """Write :func:`chrome_trace` as JSON. Raises ConfigError if the file cannot be written."""
    try:
        path.write_text(json.dumps(chrome_trace(requests)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}") from error
