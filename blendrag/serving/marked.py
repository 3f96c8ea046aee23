"""Texts that clients mark as documents in their prompts: kept as a vector store's are, the last used ones."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from hashlib import sha256
from typing import Any

from blendrag.prompt import encode_document
from blendrag.serving.known_texts import KnownTexts
from blendrag.serving.owners import owner_of
from blendrag.serving.texts import Texts
from blendrag.store.catalogue import Catalogue

LEAST_TOKENS = 64
"""Tokens below which a marked text is no document."""
MOST_TOKENS = 1 << 18
"""Tokens of the marked texts that are kept, together."""
COLLECTION = "marked"
"""The collection of marked texts, by which they can be listed and forgotten."""

_NAMED = 24  # characters of a text that its evidence names it by


class MarkedTexts:
    """The texts that clients have marked, of those that nobody else owns. Thread-safe."""

    def __init__(self, catalogue: Catalogue, texts: Texts, known: KnownTexts, tokenizer: Any) -> None:
        self._catalogue, self._texts, self._known, self._tokenizer = catalogue, texts, known, tokenizer
        self._tokens: dict[str, int] | None = None  # by owner, least recently used first
        self._lock = threading.Lock()

    def keep(self, texts: Iterable[str]) -> None:
        """Have texts prefilled beside prompts, in place of those that were used least recently. Raises
        StoreError, StoreFullError."""
        with self._lock:
            kept, new = self._kept(), dict[str, str]()
            for text in filter(None, (text.strip() for text in texts)):
                owner, tokens = _owner(text), 0
                if self._known.now().known(text) is None:  # any more, it may be
                    tokens = len(encode_document(self._tokenizer, text))
                    if not LEAST_TOKENS <= tokens <= MOST_TOKENS:
                        continue
                    new[owner] = text
                if tokens or owner in kept:
                    kept[owner] = kept.pop(owner, tokens)
            gone, total = list[str](), sum(kept.values())
            for owner, tokens in kept.items():
                if total <= MOST_TOKENS:
                    break
                gone.append(owner)
                total -= tokens
            for owner in gone:
                del kept[owner]
            self._texts.register({owner: [text] for owner, text in new.items() if owner in kept})
            self._texts.release(gone)
            owned = self._catalogue.owners(owner_of(COLLECTION, ""))
            self._texts.repair(key for owner in new for key in owned.get(owner, ()))

    def _kept(self) -> dict[str, int]:
        if self._tokens is None:
            owners = self._catalogue.owners(owner_of(COLLECTION, ""))
            entries = {one.key: one for keys in owners.values() for one in self._catalogue.entries_of(keys)}
            self._tokens = {
                owner: sum(len(entries[key].token_ids) for key in keys if key in entries)
                for owner, keys in owners.items()
            }
        return self._tokens


def _owner(text: str) -> str:
    name = " ".join(text[: 4 * _NAMED].split())[:_NAMED]
    return owner_of(COLLECTION, f"{name} ({sha256(text.encode()).hexdigest()[:32]})")
