"""``WarmKV``: prefills nodes on their way into a vector store of any kind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from typing import Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.schema import BaseNode, TransformComponent

from blendrag import KeptDocuments, SyncReport, spellings
from blendrag.errors import ConfigError
from llama_index.llms.blendrag.base import BlendLLM
from llama_index.llms.blendrag.nodes import sources_by_id, texts_by_id


class WarmKV(TransformComponent):
    """The last transformation of an ``IngestionPipeline`` or index: prefills the nodes and passes them on.

    For vector stores other than Chroma, which ``BlendChromaVectorStore`` serves better, because a
    transformation sees additions only:

    - What is deleted from the vector store stays here until :meth:`remove` or :meth:`sync` is told.
    - A pipeline's cache skips transformations of nodes that it has seen. That costs nothing as long as the
      KV is there; if it was deleted, :meth:`sync` computes it again (or ``disable_cache=True``).
    - ``index.insert_nodes`` runs no transformations.
    - On an engine of this process's own, it refuses to work in others, such as the workers of
      ``num_workers``, each of which would start one.

    Running it again over the same nodes computes nothing. ``collection`` tells several vector stores apart.
    """

    llm: BlendLLM = Field(description="Whose KV is kept.", exclude=True)
    collection: str = Field(
        "WarmKV", description="What the texts are kept for, such as the vector store's name."
    )
    bare_text: bool = Field(True, description="Keep the KV of nodes without their metadata as well.")
    show_progress: bool | None = Field(False, description="Show a bar; None: if someone is watching.")

    _process: int = PrivateAttr(default_factory=os.getpid)

    @classmethod
    def class_name(cls) -> str:
        return "WarmKV"

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Prefill nodes and pass them on. Raises ConfigError in another process, and what ``Collection.add``
        does."""
        texts, sources = texts_by_id(nodes, self.bare_text), sources_by_id(nodes)
        self._kept().add(texts, sources=sources, progress=self.show_progress)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        return await asyncio.to_thread(self, nodes, **kwargs)

    def remove(self, node_ids: Iterable[str]) -> None:
        """Forget nodes, and the KV of texts that no other node has. Ids are those of the nodes, or what a
        vector store makes of them: a UUID with dashes, or without."""
        self._kept().remove(form for id in node_ids for form in spellings(id))

    def sync(self, nodes: Iterable[BaseNode]) -> SyncReport:
        """Make ``nodes`` all that is kept for this collection, and prefill what is not."""
        nodes = list(nodes)
        texts, sources = texts_by_id(nodes, self.bare_text), sources_by_id(nodes)
        return self._kept().sync(texts, sources=sources, progress=self.show_progress)

    def _kept(self) -> KeptDocuments:
        if os.getpid() != self._process and self.llm.base_url is None:
            raise ConfigError(
                "WarmKV does not run in worker processes, each would start an engine:"
                " use num_workers=1, or leave WarmKV out of the pipeline and call its sync(nodes) after it"
            )
        return self.llm.collection(f"llama-index/{self.collection}")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._process = state["__pydantic_private__"]["_process"]
