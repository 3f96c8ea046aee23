"""blendrag: answer from retrieved documents without prefilling them again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blendrag import errors
from blendrag.errors import BlendragError
from blendrag.version import __version__

if TYPE_CHECKING:
    from blendrag import vectorstores
    from blendrag.chat import foreign
    from blendrag.chat.answer import Answer, Piece
    from blendrag.chat.chat import Chat
    from blendrag.chat.interface import ChatModel
    from blendrag.chat.request import ChatRequest, Source
    from blendrag.chat.speculation import Speculation
    from blendrag.engine.client.generation import Grammar, Sampling
    from blendrag.index.index import BlendIndex
    from blendrag.index.ingest import IngestReport
    from blendrag.index.loaders import Document
    from blendrag.names import spellings
    from blendrag.options import BlendOptions, BlendOverrides
    from blendrag.progress import Progress, progress_bar
    from blendrag.remote.chat import RemoteChat, open_chat
    from blendrag.remote.http import without_password
    from blendrag.serving.collection import Collection, KeptDocuments, SyncReport
    from blendrag.serving.evidence import Evidence
    from blendrag.serving.prefill import PrefillReport
    from blendrag.settings import Settings
    from blendrag.strip import Strip
    from blendrag.text import plain

__all__ = [
    "Answer",
    "BlendIndex",
    "BlendOptions",
    "BlendOverrides",
    "BlendragError",
    "Chat",
    "ChatModel",
    "ChatRequest",
    "Collection",
    "Document",
    "Evidence",
    "Grammar",
    "IngestReport",
    "KeptDocuments",
    "Piece",
    "PrefillReport",
    "Progress",
    "RemoteChat",
    "Sampling",
    "Settings",
    "Source",
    "Speculation",
    "Strip",
    "SyncReport",
    "__version__",
    "errors",
    "foreign",
    "open_chat",
    "plain",
    "progress_bar",
    "spellings",
    "vectorstores",
    "without_password",
]

_HOMES = {
    "Answer": "blendrag.chat.answer",
    "BlendIndex": "blendrag.index.index",
    "BlendOptions": "blendrag.options",
    "BlendOverrides": "blendrag.options",
    "Chat": "blendrag.chat.chat",
    "ChatModel": "blendrag.chat.interface",
    "ChatRequest": "blendrag.chat.request",
    "Collection": "blendrag.serving.collection",
    "Document": "blendrag.index.loaders",
    "Evidence": "blendrag.serving.evidence",
    "Grammar": "blendrag.engine.client.generation",
    "IngestReport": "blendrag.index.ingest",
    "KeptDocuments": "blendrag.serving.collection",
    "Piece": "blendrag.chat.answer",
    "PrefillReport": "blendrag.serving.prefill",
    "Progress": "blendrag.progress",
    "RemoteChat": "blendrag.remote.chat",
    "Sampling": "blendrag.engine.client.generation",
    "Settings": "blendrag.settings",
    "Source": "blendrag.chat.request",
    "Speculation": "blendrag.chat.speculation",
    "Strip": "blendrag.strip",
    "SyncReport": "blendrag.serving.collection",
    "foreign": "blendrag.chat.foreign",
    "open_chat": "blendrag.remote.chat",
    "plain": "blendrag.text",
    "progress_bar": "blendrag.progress",
    "spellings": "blendrag.names",
    "vectorstores": "blendrag.vectorstores",
    "without_password": "blendrag.remote.http",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that ``import blendrag`` stays quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'blendrag' has no attribute {name!r}")
    import importlib

    home = importlib.import_module(_HOMES[name])
    return getattr(home, name, home)  # or a module of that name
