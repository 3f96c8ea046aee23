"""What a question gives back: the text, where it comes from, and the evidence of what was computed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from blendrag.index.vectors import Hit
from blendrag.serving.evidence import Evidence


@dataclass(frozen=True, slots=True)
class Source:
    """A chunk that was put into the prompt. ``score``: cosine similarity to the question."""

    source: str
    ordinal: int
    score: float
    text: str

    @classmethod
    def of(cls, hit: Hit) -> Source:
        return cls(hit.source, hit.ordinal, hit.score, hit.text)


@dataclass(frozen=True, slots=True)
class Answer:
    """``str(answer)`` is its text. Times in seconds; ``ttft_s``: from the engine being asked to a token."""

    text: str
    sources: tuple[Source, ...]
    ttft_s: float
    total_s: float
    finish_reason: str | None
    tokens: int
    evidence: Evidence

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)
