"""From a window to the row of numbers that the classifier reads: vectors of its prompts, then scalars.

LPC section 3.2: the embedder is frozen; beside its vector stands the number of turns. Two things differ. The
latest prompt has a vector of its own, and those before it have their mean: it tells more than the paper's one
vector of all, and a prompt is embedded once, not again with each that follows. And counts are logarithms, as
the step from the first turn to the second says more than that from the 20th to the 21st.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import xxhash

from blendrag.embedder import Embedder
from blendrag.forecast.conversation import PROMPTS, TOKENS, Window, shortened
from blendrag.progress import SILENT, Progress

VERSION = 1  # of rows: raised whenever the same window gives other numbers
LAYOUT: Literal["apart"] = "apart"  # of rows, as manifests and logs name it
# Turns of the conversation; characters of the latest prompt, and in the mean over the window's.
SCALARS = ("turns", "characters", "mean_characters")

Rows = npt.NDArray[np.float32]
Vector = npt.NDArray[np.float32]

_BATCH = 64


class VectorCache(ABC):
    """Vectors [dimension] of texts, by the texts' hashes, so that no text is embedded twice."""

    @abstractmethod
    def get(self, keys: Iterable[bytes]) -> dict[bytes, Vector]:
        """Those of the vectors that are there."""

    @abstractmethod
    def put(self, vectors: Mapping[bytes, Vector]) -> None:
        """Keep these too."""


class MemoryCache(VectorCache):
    """The latest ``capacity`` vectors: a conversation's earlier prompts are known when the next comes."""

    def __init__(self, capacity: int = 10_000) -> None:
        self._capacity = capacity
        self._vectors: OrderedDict[bytes, Vector] = OrderedDict()

    def get(self, keys: Iterable[bytes]) -> dict[bytes, Vector]:
        found = {key: self._vectors[key] for key in keys if key in self._vectors}
        for key in found:
            self._vectors.move_to_end(key)
        return found

    def put(self, vectors: Mapping[bytes, Vector]) -> None:
        self._vectors.update(vectors)
        while len(self._vectors) > self._capacity:
            self._vectors.popitem(last=False)


class Features:
    """Makes rows, with an embedder that is loaded for the first of them."""

    def __init__(self, embedder: Embedder, cache: VectorCache | None = None) -> None:
        self.embedder = embedder
        self._cache = cache or MemoryCache()

    def rows(self, windows: Sequence[Window], progress: Progress = SILENT) -> Rows:
        """[windows, vectors + scalars] for at least one window. Raises ModelNotFoundError.

        Interrupted, it goes on from where its cache is.
        """
        keyed, texts = self._texts(windows)
        progress.note("embedding prompts")
        vectors = self._vectors(texts, progress)
        rows = []
        for keys, window in zip(keyed, windows, strict=True):
            *earlier, latest = (vectors[key] for key in keys)
            before = np.mean(earlier, axis=0) if earlier else np.zeros_like(latest)
            rows.append(np.concatenate([latest, before, _scalars(window)]))
        return np.stack(rows)

    def vectors(self, texts: Sequence[str]) -> Rows:
        """[texts, dimension], of whole texts. Interrupted, it goes on from where its cache is."""
        keys = [_key(text) for text in texts]
        found = self._vectors(dict(zip(keys, texts, strict=True)), SILENT)
        return np.stack([found[key] for key in keys])

    def _texts(self, windows: Sequence[Window]) -> tuple[list[list[bytes]], dict[bytes, str]]:
        """The keys of each window's texts, oldest first; and the texts of all keys."""
        tokenizer = self.embedder.tokenizer
        special = int(tokenizer.num_special_tokens_to_add())
        limit = min(TOKENS, self.embedder.max_tokens or TOKENS) - special  # MiniLM reads 256 of a text
        share = min((TOKENS - special) // PROMPTS, limit)  # however many there are: vectors are kept
        cut: dict[str, str] = {}
        keyed: list[list[bytes]] = []
        texts: dict[bytes, str] = {}
        for window in windows:
            prompts = window.prompts[-PROMPTS:] or ("",)
            for prompt in prompts:
                if prompt not in cut:
                    cut[prompt] = shortened(prompt, tokenizer, share)
            parts = [cut[prompt] for prompt in prompts]
            keys = [_key(part) for part in parts]
            texts.update(zip(keys, parts, strict=True))
            keyed.append(keys)
        return keyed, texts

    def _vectors(self, texts: dict[bytes, str], progress: Progress) -> dict[bytes, Vector]:
        vectors = self._cache.get(texts)
        missing = sorted(texts.keys() - vectors.keys(), key=lambda key: (len(texts[key]), key))
        progress.total(len(missing))
        for done in range(0, len(missing), _BATCH):
            batch = missing[done : done + _BATCH]
            made = self.embedder.embed([texts[key] for key in batch])
            # A model that stumbles over a text says nothing about it; it must not spoil the others' mean.
            new = dict(zip(batch, np.nan_to_num(np.asarray(made, dtype=np.float32)), strict=True))
            self._cache.put(new)
            vectors.update(new)
            progress.advance(len(batch))
        return vectors


def _key(text: str) -> bytes:
    return xxhash.xxh3_128_digest(text.encode())


def _scalars(window: Window) -> Rows:
    lengths = [len(prompt) for prompt in window.prompts] or [0]
    return np.log1p(np.array([window.turns, lengths[-1], np.mean(lengths)], dtype=np.float32))
