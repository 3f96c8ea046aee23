"""Who did what when: for the plot of loading and computing side by side (CacheBlend figure 10)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Event = tuple[str, str, float, float]  # lane, name, begin and end in seconds on one clock


class Trace:
    """Events of one request, from several threads. Off, it costs a comparison per event."""

    def __init__(self, on: bool = True) -> None:
        self.on = on
        self.events: list[Event] = []

    def add(self, lane: str, name: str, begin: float) -> None:
        """Something that began at ``begin`` (``time.perf_counter``) ends now."""
        if self.on:
            self.events.append((lane, name, begin, time.perf_counter()))

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(lane, name, begin)


def chrome_trace(events: Sequence[Event]) -> dict[str, Any]:
    """Events in Chrome's trace format (chrome://tracing, Perfetto): times in microseconds from the first
    event."""
    zero = min((begin for _, _, begin, _ in events), default=0.0)
    lanes = {lane: number for number, lane in enumerate(dict.fromkeys(lane for lane, *_ in events))}
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": lane}}
        for lane, number in lanes.items()
    ]
    bars = [
        {
            "ph": "X",
            "name": name,
            "cat": lane,
            "pid": 0,
            "tid": lanes[lane],
            "ts": round(1e6 * (begin - zero), 1),
            "dur": round(1e6 * (end - begin), 1),
        }
        for lane, name, begin, end in events
    ]
    return {"traceEvents": [*names, *bars], "displayTimeUnit": "ms"}


def write_trace(events: Sequence[Event], path: Path) -> None:
    """Write :func:`chrome_trace` as JSON."""
    path.write_text(json.dumps(chrome_trace(events)), encoding="utf-8")
