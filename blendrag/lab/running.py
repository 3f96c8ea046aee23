"""The engine for the time of a measurement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from blendrag.engine.client.engine import Engine
from blendrag.errors import ModelNotSupportedError
from blendrag.progress import Progress
from blendrag.settings import Settings


@contextmanager
def blending_engine(settings: Settings, progress: Progress) -> Iterator[Engine]:
    """An engine that blends. Raises ModelNotSupportedError if this model is not blended, EngineError."""
    engine = Engine.shared(settings, progress.note)
    try:
        if not engine.blends:
            raise ModelNotSupportedError(f"this model is not blended: {engine.facts['reason']}")
        yield engine
    finally:
        engine.release()
