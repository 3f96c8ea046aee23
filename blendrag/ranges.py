"""Positions of tokens as ranges in one line of text, as printers take pages: ``0-9,40,44-47``."""

from __future__ import annotations

from collections.abc import Iterable

Run = tuple[int, int]
"""The positions [first, end)."""


def write_ranges(positions: Iterable[int]) -> str:
    """Write ascending positions as ranges."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1][1] += 1
        else:
            runs.append([position, position + 1])
    return ",".join(f"{first}-{end - 1}" if end - first > 1 else f"{first}" for first, end in runs)


def read_ranges(text: str) -> list[Run]:
    """Read ranges back as runs. Raises ValueError for what are none."""
    runs = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        runs.append((int(first), int(last or first) + 1))
    return runs
