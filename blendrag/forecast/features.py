"""From a window to the row of numbers that the classifier reads: vectors of its prompts, then scalars.

LPC section 3.2: the embedder is frozen; beside its vector stands the number of turns. Here logarithms of
counts are taken, as the step from the first turn to the second says more than that from the 20th to the 21st.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from blendrag.embedder import Embedder
from blendrag.forecast.vectors import Vector, VectorCache, key_of
from blendrag.forecast.window import PROMPTS, TOKENS, Window, shortened

VERSION = 1  # of rows: raised whenever the same window gives other numbers
# Turns of the conversation; characters of the latest prompt, and in the mean over the window's.
SCALARS = ("turns", "characters", "mean_characters")

Rows = npt.NDArray[np.float32]
Progress = Callable[[int, int], None]  # texts embedded so far, texts to embed

Layout = Literal["joined", "apart"]
"""``joined``: one vector of all prompts, as in the paper. ``apart``: a vector of the latest prompt and the
mean of those before it; a prompt is embedded once, by itself, and not again with each that follows."""
DEFAULT_LAYOUT: Layout = "apart"  # measured: it tells more, and costs a fifth
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

_BATCH = 64


class Features:
    """Makes rows, with an embedder that is loaded for the first of them."""

    def __init__(self, embedder: Embedder, layout: Layout, cache: VectorCache) -> None:
        self.embedder, self.layout = embedder, layout
        self._cache = cache

    def rows(self, windows: Sequence[Window], progress: Progress | None = None) -> Rows:
        """[windows, vectors + scalars] for at least one window. Raises ModelNotFoundError.

        Interrupted, it goes on from where its cache is.
        """
        keyed, texts = self._texts(windows)
        vectors = self._vectors(texts, progress)
        return np.stack(
            [
                np.concatenate([*self._laid_out([vectors[key] for key in keys]), _scalars(window)])
                for keys, window in zip(keyed, windows, strict=True)
            ]
        )

    def _texts(self, windows: Sequence[Window]) -> tuple[list[list[bytes]], dict[bytes, str]]:
        """The keys of each window's texts, oldest first; and the texts of all keys."""
        cut: dict[tuple[str, int], str] = {}
        keyed: list[list[bytes]] = []
        texts: dict[bytes, str] = {}
        tokenizer = self.embedder.tokenizer
        special = int(tokenizer.num_special_tokens_to_add())
        limit = min(TOKENS, self.embedder.max_tokens or TOKENS) - special  # MiniLM reads 256 of a text
        apart = min((TOKENS - special) // PROMPTS, limit)  # however many there are: vectors are kept
        for window in windows:
            prompts = window.prompts[-PROMPTS:] or ("",)
            share = limit // len(prompts) if self.layout == "joined" else apart
            for prompt in prompts:
                if (prompt, share) not in cut:
                    cut[prompt, share] = shortened(prompt, tokenizer, share)
            parts = [cut[prompt, share] for prompt in prompts]
            if self.layout == "joined":
                parts = ["\n".join(parts)]
            keys = [key_of(part) for part in parts]
            texts.update(zip(keys, parts, strict=True))
            keyed.append(keys)
        return keyed, texts

    def _vectors(self, texts: dict[bytes, str], progress: Progress | None) -> dict[bytes, Vector]:
        vectors = self._cache.get(texts)
        missing = sorted(texts.keys() - vectors.keys(), key=lambda key: (len(texts[key]), key))
        for done, batch in _batches(missing):
            if progress:
                progress(done, len(missing))
            made = self.embedder.embed([texts[key] for key in batch])
            # A model that stumbles over a text says nothing about it; it must not spoil the others' mean.
            new = dict(zip(batch, np.nan_to_num(np.asarray(made, dtype=np.float32)), strict=True))
            self._cache.put(new)
            vectors.update(new)
        return vectors

    def _laid_out(self, vectors: list[Vector]) -> list[Vector]:
        if self.layout == "joined":
            return vectors
        *earlier, latest = vectors
        return [latest, np.mean(earlier, axis=0) if earlier else np.zeros_like(latest)]


def turns_of(rows: Rows) -> npt.NDArray[np.int64]:
    """[n]: the number of turns that the rows tell of."""
    turns: npt.NDArray[np.int64] = np.rint(np.expm1(rows[:, -len(SCALARS)])).astype(np.int64)
    return turns


def _batches(keys: list[bytes]) -> Iterator[tuple[int, list[bytes]]]:
    for start in range(0, len(keys), _BATCH):
        yield start, keys[start : start + _BATCH]


def _scalars(window: Window) -> Rows:
    lengths = [len(prompt) for prompt in window.prompts] or [0]
    return np.log1p(np.array([window.turns, lengths[-1], np.mean(lengths)], dtype=np.float32))
