"""Embedding: texts to vectors, through sentence-transformers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from blendrag.errors import ModelNotFoundError, needs

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_BATCH = 64


class Embedder:
    """A sentence-transformers model, loaded when it is first used.

    ``model_path`` is a folder or a hub id; ``name`` is what a store records about the vectors it holds.
    device: as torch names it; None: an accelerator where there is one.
    """

    def __init__(
        self, model_path: str | os.PathLike[str], *, name: str | None = None, device: str | None = None
    ) -> None:
        self._path, self._device = os.fspath(model_path), device
        self._model: SentenceTransformer | None = None
        self.name = name or self._path

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return one vector of length 1 per text. Raises ModelNotFoundError if there is no such model."""
        if not texts:
            return []
        vectors = self._load().encode(
            list(texts), batch_size=_BATCH, normalize_embeddings=True, show_progress_bar=False
        )
        return vectors.tolist()

    @property
    def tokenizer(self) -> Any:
        """The model's own tokenizer, of transformers. Raises ModelNotFoundError."""
        return self._load().tokenizer

    @property
    def max_tokens(self) -> int | None:
        """Return how many tokens of a text the model reads, special ones included; None: not known."""
        return self._load().max_seq_length

    def _load(self) -> SentenceTransformer:
        if self._model is None:
            with needs("blendrag[index]"):
                from sentence_transformers import SentenceTransformer
                from transformers.utils import logging

            shown = logging.is_progress_bar_enabled()
            logging.disable_progress_bar()  # it draws one while it loads the weights
            try:
                self._model = SentenceTransformer(self._path, device=self._device)
            except (OSError, ValueError) as error:
                raise ModelNotFoundError(f"no embedding model {self._path!r}: {error}") from error
            finally:
                if shown:
                    logging.enable_progress_bar()
        return self._model
