"""The row of numbers that the classifier reads of a window: vectors of its prompts, then its length.

LPC section 3.2: the embedder is frozen, and the number of turns is added to its vector. Two things differ.
The latest prompt has a vector of its own, and those before it have their mean: it tells more than the paper's
one vector of all, and a prompt is embedded once, not again with each that follows. And the count is a
logarithm, as the step from the first turn to the second says more than that from the 20th to the 21st.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import xxhash

from blendrag.embedder import Embedder
from blendrag.forecast.conversation import PROMPTS, TOKENS, Window, shortened
from blendrag.models import resolve_embedder
from blendrag.progress import SILENT, Progress

Rows = npt.NDArray[np.float32]
Vector = npt.NDArray[np.float32]

_BATCH = 64
_REMEMBERED = 10_000  # vectors: a conversation's earlier prompts are known when the next comes


class Features:
    """A maker of rows, with an embedder that is loaded for the first of them."""

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder
        self._known: OrderedDict[bytes, Vector] = OrderedDict()

    def rows(self, windows: Sequence[Window], progress: Progress = SILENT) -> Rows:
        """Return [windows, vectors + 1] for at least one window. Raises ModelNotFoundError."""
        read = [window.prompts[-PROMPTS:] or ("",) for window in windows]
        texts = self._texts(dict.fromkeys(chain.from_iterable(read)))
        keys = {prompt: xxhash.xxh3_128_digest(text.encode()) for prompt, text in texts.items()}
        progress.note("embedding prompts")
        vectors = self._vectors({keys[prompt]: text for prompt, text in texts.items()}, progress)
        rows = []
        for prompts, window in zip(read, windows, strict=True):
            *earlier, latest = (vectors[keys[prompt]] for prompt in prompts)
            before = np.mean(earlier, axis=0) if earlier else np.zeros_like(latest)
            rows.append(np.concatenate([latest, before, [np.log1p(window.turns)]], dtype=np.float32))
        return np.stack(rows)

    def _texts(self, prompts: Iterable[str]) -> dict[str, str]:
        """Return what is read of each prompt."""
        tokenizer = self.embedder.tokenizer
        special = int(tokenizer.num_special_tokens_to_add())
        limit = min(TOKENS, self.embedder.max_tokens or TOKENS) - special  # MiniLM reads 256 of a text
        share = min((TOKENS - special) // PROMPTS, limit)  # however many prompts there are: vectors are kept
        return {prompt: shortened(prompt, tokenizer, share) for prompt in prompts}

    def _vectors(self, texts: dict[bytes, str], progress: Progress) -> dict[bytes, Vector]:
        vectors = {key: self._known[key] for key in texts if key in self._known}
        missing = sorted(texts.keys() - vectors.keys(), key=lambda key: (len(texts[key]), key))
        progress.total(len(missing))
        for done in range(0, len(missing), _BATCH):
            batch = missing[done : done + _BATCH]
            made = self.embedder.embed([texts[key] for key in batch])
            # A model that stumbles over a text says nothing about it; it must not spoil the others' mean.
            new = dict(zip(batch, np.nan_to_num(np.asarray(made, dtype=np.float32)), strict=True))
            vectors.update(new)
            progress.advance(len(batch))
        for key, vector in vectors.items():
            self._known[key] = vector
            self._known.move_to_end(key)
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return vectors


def features_of(embedder: str, device: str | None = None) -> Features:
    """Return features with an embedder of their own, as the index names it. device: as torch names it. Raises
    ModelNotFoundError or MissingDependencyError."""
    return Features(Embedder(resolve_embedder(embedder), name=embedder, device=device))
