"""Events that LlamaIndex's instrumentation is told beyond its own."""

from __future__ import annotations

from typing import Any

from llama_index.core.instrumentation.events.base import BaseEvent  # type: ignore[attr-defined]


class BlendCacheEvent(BaseEvent):
    """An event at the end of every answer: what of its prompt was computed, and what was not.

    usage: as in ``raw["usage"]`` of the response, in tokens. evidence: as in ``raw["blendrag"]``.
    """

    model: str
    usage: dict[str, Any]
    evidence: dict[str, Any]

    @classmethod
    def class_name(cls) -> str:
        return "BlendCacheEvent"
