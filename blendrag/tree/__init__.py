"""Exact prefixes: the knowledge tree of RAGCache (section 4.1), in addition to chunks that are blended.

A node is a document behind all that stands before it in a prompt, so its KV is exactly what full prefill
makes, where prompts begin alike. The root's children hold what stands before the first document.
"""

from blendrag.tree.path import Node, Nodes, path_of

__all__ = ["Node", "Nodes", "path_of"]
