"""LangChain on blendrag: a chat model and a vector store that share stored KV caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_blendrag.chat_models import ChatBlend
    from langchain_blendrag.retrievers import SpeculativeRetriever
    from langchain_blendrag.vectorstores import BlendChroma
    from langchain_blendrag.warming import warm

__all__ = ["BlendChroma", "ChatBlend", "SpeculativeRetriever", "warm"]

_HOMES = {
    "BlendChroma": "langchain_blendrag.vectorstores",
    "ChatBlend": "langchain_blendrag.chat_models",
    "SpeculativeRetriever": "langchain_blendrag.retrievers",
    # Not a module "warm": importing it would put the module where the function is expected.
    "warm": "langchain_blendrag.warming",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that ``import langchain_blendrag`` stays quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'langchain_blendrag' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
