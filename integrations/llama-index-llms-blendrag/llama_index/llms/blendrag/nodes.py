"""Texts of a node that a prompt may show."""

from __future__ import annotations

from collections.abc import Iterable

from llama_index.core.schema import BaseNode, MetadataMode


def node_texts(node: BaseNode, bare_text: bool) -> list[str]:
    """Return the node as synthesizers write it, metadata first; and its bare text, for engines that put
    something between the two, as CitationQueryEngine does."""
    texts = [node.get_content(metadata_mode=MetadataMode.LLM)]
    if bare_text:
        texts.append(node.get_content(metadata_mode=MetadataMode.NONE))
    return list(dict.fromkeys(text.strip() for text in texts))


def texts_by_id(nodes: Iterable[BaseNode], bare_text: bool) -> dict[str, list[str]]:
    """Return the texts of nodes, as a collection takes them."""
    return {node.node_id: node_texts(node, bare_text) for node in nodes}


def sources_by_id(nodes: Iterable[BaseNode]) -> dict[str, str]:
    """Return the documents that nodes were made of, as a collection takes them."""
    return {node.node_id: node.ref_doc_id for node in nodes if node.ref_doc_id}
