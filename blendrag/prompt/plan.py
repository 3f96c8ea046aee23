"""The plan of a prompt: segments with known KV, and segments that the model has to read."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Span = tuple[str, int, int]
"""Tokens of a prompt with stored KV: the chunk's key, the place of its first token in the prompt, and their
number."""


@dataclass(frozen=True, slots=True)
class Form:
    """A form, ``text``, in which a prompt holds the chunk ``key``, escaped. tokens: of the known text."""

    key: str
    text: str
    source: str | None
    tokens: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the prompt and its token ids.

    ``chunk_key`` names the stored chunk whose KV can stand in for the segment (``token_ids`` is the
    chunk's ids, or a prefix of them); ``None`` marks a fresh segment, which is always computed.
    """

    text: str
    token_ids: tuple[int, ...]
    chunk_key: str | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True)
class DocumentNote:
    """A note on what became of one document: ``reused`` of its ``tokens`` are cached; ``reason`` says why."""

    source: str | None
    found: bool
    reason: str
    tokens: int
    reused: int


@dataclass(frozen=True)
class PromptPlan:
    """A prompt as an ordered row of segments; the ids of all of them, decoded, give ``text``
    (but for characters that the model's vocabulary cannot write)."""

    segments: tuple[Segment, ...]
    notes: tuple[DocumentNote, ...] = ()
    forms: tuple[Form, ...] = ()
    """Other forms of known texts in it, of which no KV is kept yet."""

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)

    @property
    def cached_segments(self) -> tuple[Segment, ...]:
        return tuple(segment for segment in self.segments if segment.chunk_key is not None)

    @property
    def cached_keys(self) -> tuple[str, ...]:
        """Return chunk keys in the prompt's order, with repeats: what the blended KV depends on."""
        return tuple(segment.chunk_key for segment in self.segments if segment.chunk_key is not None)

    @property
    def cached_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.cached_segments)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans of the cached segments, ascending."""
        return tuple(
            (segment.chunk_key, start, len(segment.token_ids))
            for start, segment in self._with_starts()
            if segment.chunk_key is not None
        )

    def describe(self, unstored: Container[str] = (), held: int = 0) -> list[dict[str, Any]]:
        """Return rows for ``explain()``: one per segment, then one per document that was not found. unstored:
        chunks whose KV is not there, but for the first ``held`` tokens of the prompt."""
        reasons = iter([note.reason for note in self.notes if note.found])
        rows: list[dict[str, Any]] = []
        for start, segment in self._with_starts():
            cached, tokens = segment.chunk_key is not None, len(segment.token_ids)
            reason = next(reasons, "") if cached else ""
            if segment.chunk_key in unstored and start >= held:
                cached, reason = False, "its KV is not stored now: if it stays so, ingest again"
            row = {
                "kind": "cached" if cached else "fresh",
                "source": segment.source,
                "tokens": tokens,
                "reused": tokens if cached else 0,
                "reason": reason,
                "start": start,
                "chunk_key": segment.chunk_key,
                "text": preview(segment.text),
            }
            rows.append(row)
        absent = {"kind": "not found", "reused": 0, "start": None, "chunk_key": None, "text": ""}
        return rows + [
            {**absent, "source": note.source, "tokens": note.tokens, "reason": note.reason}
            for note in self.notes
            if not note.found
        ]

    def _with_starts(self) -> Iterator[tuple[int, Segment]]:
        start = 0
        for segment in self.segments:
            yield start, segment
            start += len(segment.token_ids)


def preview(text: str) -> str:
    """Return ``text`` on one line of at most 60 characters."""
    line = " ".join(text[:240].split())
    return line if len(line) <= 60 else line[:59] + "…"
