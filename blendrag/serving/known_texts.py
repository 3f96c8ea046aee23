"""The texts of a catalogue, to be found in prompts: read once, and then as they change."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from blendrag.prompt import Recogniser
from blendrag.serving.owners import document_of
from blendrag.store.catalogue import Catalogue
from blendrag.store.contexts import Chunk


class KnownTexts:
    """The known texts of a catalogue, whichever process changes it. Thread-safe."""

    def __init__(self, catalogue: Catalogue, tokenizer: Any) -> None:
        self._catalogue, self._tokenizer = catalogue, tokenizer
        self._recogniser: Recogniser | None = None
        self._number = 0  # of the last change that was read
        self._lock = threading.Lock()

    def now(self) -> Recogniser:
        """Return a recogniser of the texts that there are now. The first call reads all, others what has
        changed since."""
        with self._lock:
            number, keys = self._catalogue.changes(self._number)
            if self._recogniser is None or keys is None:
                recogniser = Recogniser(self._tokenizer)
                _add(recogniser, self._catalogue.entries(), self._catalogue.an_owner_of())
                self._recogniser = recogniser
            elif keys:
                entries = self._catalogue.entries_of(keys)
                for key in set(keys).difference(entry.key for entry in entries):
                    self._recogniser.remove(key)
                _add(self._recogniser, entries, self._catalogue.an_owner_of(keys))
            self._number = number
            return self._recogniser


def _add(recogniser: Recogniser, entries: Iterable[Chunk], owners: Mapping[str, str]) -> None:
    for entry in entries:
        source = document_of(owners[entry.key]) if entry.key in owners else None
        recogniser.add(entry.key, entry.text, entry.token_ids, source)
