"""An embedder without a forward pass: the mean of a model's word vectors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from blendrag.embedder import Embedder
from blendrag.errors import ModelNotFoundError
from blendrag.models import resolve_embedder

PREFIX = "words:"
_TABLES = ("word_embeddings.weight", "embed_tokens.weight", "wte.weight")  # how models call theirs
_WEIGHTS = "model.safetensors"


class WordVectors(Embedder):
    """The first table of a sentence-transformers model, and none of its layers.

    How users take their leave is in the words that they use, far less in their order: most of what the model
    tells the predictor is in this table, at a hundredth of its time and without its libraries (see
    docs/eviction.md). The mean of all words is taken off first, as they have a direction in common.
    """

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def max_tokens(self) -> int | None:
        return None

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """One vector of length 1 per text; of zeros for one without tokens. Raises ModelNotFoundError."""
        if not texts:
            return []
        encoded = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return [self._mean(ids).tolist() for ids in encoded["input_ids"]]

    def _mean(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        if not ids:
            return np.zeros(self._table.shape[1], np.float32)
        mean = self._table[ids].mean(axis=0, dtype=np.float32)
        length = float(np.linalg.norm(mean))
        return mean / length if length else mean

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self._path)
        except (OSError, ValueError) as error:
            raise ModelNotFoundError(f"no embedding model {self._path!r}: {error}") from error

    @cached_property
    def _table(self) -> npt.NDArray[np.float16]:
        """[vocabulary, dimension]; half as much memory, and as good."""
        from transformers.utils import cached_file

        try:
            with safe_open(cached_file(self._path, _WEIGHTS), framework="numpy") as weights:
                name = next((name for name in weights.keys() if name.endswith(_TABLES)), None)  # noqa: SIM118
                if name is None:
                    raise ModelNotFoundError(f"{self._path!r} has no table of words in {_WEIGHTS}")
                table = weights.get_tensor(name).astype(np.float32)
        except (OSError, SafetensorError) as error:
            raise ModelNotFoundError(f"no word vectors of {self._path!r}: {error}") from error
        return (table - table.mean(axis=0)).astype(np.float16)


def open_embedder(name: str, device: str | None = None) -> Embedder:
    """The predictor's embedder ``name``: as the index has them, or ``words:`` and the name of one.

    device: as torch names it. Raises ModelNotFoundError or MissingDependencyError.
    """
    if name.startswith(PREFIX):
        return WordVectors(resolve_embedder(name.removeprefix(PREFIX)), name=name)
    return Embedder(resolve_embedder(name), name=name, device=device)
