"""blendrag: answer from retrieved documents without prefilling them again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blendrag import errors
from blendrag.errors import BlendragError
from blendrag.version import __version__

if TYPE_CHECKING:
    from blendrag.index.answer import Answer, Source
    from blendrag.index.index import BlendIndex
    from blendrag.index.ingest import IngestReport
    from blendrag.index.loaders import Document
    from blendrag.serving.evidence import Evidence
    from blendrag.settings import Settings

__all__ = [
    "Answer",
    "BlendIndex",
    "BlendragError",
    "Document",
    "Evidence",
    "IngestReport",
    "Settings",
    "Source",
    "__version__",
    "errors",
]

_HOMES = {
    "Answer": "blendrag.index.answer",
    "BlendIndex": "blendrag.index.index",
    "Document": "blendrag.index.loaders",
    "Evidence": "blendrag.serving.evidence",
    "IngestReport": "blendrag.index.ingest",
    "Settings": "blendrag.settings",
    "Source": "blendrag.index.answer",
}


def __getattr__(name: str) -> Any:
    """Import on first use: ``import blendrag`` stays quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'blendrag' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
