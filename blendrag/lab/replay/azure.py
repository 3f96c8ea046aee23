"""Azure's traces of LLM inference: times and lengths, in CSV. They do not say what was asked."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from blendrag.errors import SourceError
from blendrag.lab.replay.lines import numbered_lines, wrong_line

COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """at: seconds since the first one. prompt, answer: tokens."""

    at: float
    prompt: int
    answer: int


def read_azure(path: Path) -> list[Arrival]:
    """When requests came: what was in them has to be drawn (:mod:`.workload_retrieval`).

    Raises SourceError, naming file and line, for what is no such record, for times that run backwards, and
    for a file without requests.
    """
    arrivals: list[Arrival] = []
    first: datetime | None = None
    for number, line in numbered_lines(path):
        try:
            row = next(csv.reader([line.decode("utf-8-sig")]))
            if number == 1 and row == COLUMNS:
                continue
            stamp, prompt, answer = row
            # seven digits of a second: one more than Python knows
            time = datetime.fromisoformat(stamp[:26])
            first = first or time
            arrival = Arrival((time - first).total_seconds(), int(prompt), int(answer))
        except (ValueError, TypeError, csv.Error) as error:
            raise wrong_line(path, number, f"not {', '.join(COLUMNS)}: {error}") from None
        if arrival.prompt < 0 or arrival.answer < 0:
            raise wrong_line(path, number, "a negative number of tokens")
        if arrivals and arrival.at < arrivals[-1].at:
            raise wrong_line(path, number, "TIMESTAMP: earlier than that of the line before")
        arrivals.append(arrival)
    if not arrivals:
        raise SourceError(f"{str(path)!r} holds no requests")
    return arrivals
