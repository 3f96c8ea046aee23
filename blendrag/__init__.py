"""blendrag: answer from retrieved documents without prefilling them again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blendrag import errors
from blendrag.errors import BlendragError
from blendrag.version import __version__

if TYPE_CHECKING:
    from blendrag import vectorstores as vectorstores
    from blendrag.chat import foreign as foreign
    from blendrag.chat.answer import Answer as Answer
    from blendrag.chat.answer import Piece as Piece
    from blendrag.chat.chat import Chat as Chat
    from blendrag.chat.interface import ChatModel as ChatModel
    from blendrag.chat.request import ChatRequest as ChatRequest
    from blendrag.chat.request import Source as Source
    from blendrag.chat.speculation import Speculation as Speculation
    from blendrag.engine.client.generation import Grammar as Grammar
    from blendrag.engine.client.generation import Sampling as Sampling
    from blendrag.index.index import BlendIndex as BlendIndex
    from blendrag.index.ingest import IngestReport as IngestReport
    from blendrag.index.loaders import Document as Document
    from blendrag.names import spellings as spellings
    from blendrag.options import BlendOptions as BlendOptions
    from blendrag.options import BlendOverrides as BlendOverrides
    from blendrag.progress import Progress as Progress
    from blendrag.progress import progress_bar as progress_bar
    from blendrag.remote.chat import RemoteChat as RemoteChat
    from blendrag.remote.chat import open_chat as open_chat
    from blendrag.remote.http import without_password as without_password
    from blendrag.serving.collection import Collection as Collection
    from blendrag.serving.collection import KeptDocuments as KeptDocuments
    from blendrag.serving.collection import SyncReport as SyncReport
    from blendrag.serving.evidence import Evidence as Evidence
    from blendrag.serving.prefill import PrefillReport as PrefillReport
    from blendrag.settings import Settings as Settings
    from blendrag.strip import Strip as Strip
    from blendrag.text import plain as plain

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

__all__ = ["BlendragError", "__version__", "errors", *_HOMES]


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that ``import blendrag`` stays quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'blendrag' has no attribute {name!r}")
    import importlib

    home = importlib.import_module(_HOMES[name])
    return getattr(home, name, home)  # or a module of that name
