"""LlamaIndex on blendrag: an LLM and vector stores that share stored KV caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llama_index.llms.blendrag.base import BlendLLM
    from llama_index.llms.blendrag.rerank import SpeculativeRerank
    from llama_index.llms.blendrag.vector_store import BlendChromaVectorStore
    from llama_index.llms.blendrag.warming import WarmKV, warm

__all__ = ["BlendChromaVectorStore", "BlendLLM", "SpeculativeRerank", "WarmKV", "warm"]

_HOMES = {
    "BlendChromaVectorStore": "llama_index.llms.blendrag.vector_store",
    "BlendLLM": "llama_index.llms.blendrag.base",
    "SpeculativeRerank": "llama_index.llms.blendrag.rerank",
    "WarmKV": "llama_index.llms.blendrag.warming",
    # Not a module "warm": importing it would put the module where the function is expected.
    "warm": "llama_index.llms.blendrag.warming",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that ``import llama_index.llms.blendrag`` stays quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'llama_index.llms.blendrag' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
