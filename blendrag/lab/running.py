"""The laboratory's engine: serving's, with operations and a logits processor that measurements need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.launch import WorkerExtension
from blendrag.errors import ConfigError, ModelNotSupportedError
from blendrag.progress import Progress
from blendrag.settings import Settings

_LABORATORY = WorkerExtension(
    "blendrag.lab.worker.extension.LabWorker", ("blendrag.lab.worker.forced:ForcedTokens",)
)


def lab_engine(settings: Settings, note: Callable[[str], None] | None = None) -> Engine:
    """Do as :meth:`Engine.shared`. Who asks for an engine of these settings afterwards gets this one. Raises
    ConfigError for one with drafts, beside which vLLM takes no logits processor."""
    if settings.engine_args.get("speculative_config"):
        raise ConfigError("drafts change no answer: measure without speculative_config in engine_args")
    return Engine.shared(settings, note, _LABORATORY)


@contextmanager
def blending_engine(settings: Settings, progress: Progress, *, exact: bool = False) -> Iterator[Engine]:
    """Open an engine that blends; exact: or at least keeps exact prefixes. Raises ModelNotSupportedError if
    it does not with this model, EngineError."""
    engine = lab_engine(settings, progress.note)
    try:
        if not (engine.blends or (exact and engine.facts.states)):
            raise ModelNotSupportedError(f"this model is not blended: {engine.facts.reason}")
        yield engine
    finally:
        engine.release()
