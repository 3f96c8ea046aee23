"""Names of owners: a document of a collection, or a document of an index under its own name."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from typing import TYPE_CHECKING

import xxhash

from blendrag.store.catalogue_schema import SEPARATOR

if TYPE_CHECKING:
    from blendrag.store.catalogue import Catalogue

VOLATILE = "volatile:"
REPEATED = "(repeated)"
"""The collection of texts that nobody has named, but several prompts held. It sorts before others', so that a
text is called by the document that has it, too."""

_PROCESS = uuid.uuid4().hex  # process ids come again: in a container, all are 1
_PID = os.getpid()  # a fork has the name above too


def owner_of(collection: str, document: str) -> str:
    """Return the owner for a document; for ``""``, what all owners' names begin with."""
    return f"{collection}{SEPARATOR}{document}"


def repeat_of(text: str) -> str:
    """Return the owner for a text that nobody has named."""
    return owner_of(REPEATED, f"repeat {xxhash.xxh3_64_hexdigest(text.encode())}")


def with_repeats(catalogue: Catalogue, owners: Iterable[str]) -> set[str]:
    """Return these owners, and those of the same texts that nobody has named. What forgets a document forgets
    these, too: that prompts repeat a text does not keep it."""
    named = set(owners)
    texts = {text.strip() for owner in named for text in catalogue.texts_of(owner)}
    return named | catalogue.owned(map(repeat_of, texts))


def volatile(collection: str) -> str:
    """Return the name of a collection that ends with this process, as in-memory stores do."""
    return f"{VOLATILE}{_PROCESS}/{collection}"


def ends_here(collection: str) -> bool:
    """Return whether it ends with this process: not with another that named it, nor with a fork of that."""
    return collection.startswith(volatile("")) and os.getpid() == _PID


def ended(owners: Iterable[str]) -> list[str]:
    """Return the owners among ``owners`` whose collections have ended with other processes."""
    ours = volatile("")
    return [owner for owner in owners if owner.startswith(VOLATILE) and not owner.startswith(ours)]


def readable(owner: str) -> str:
    """Return an owner's name as people are shown it, and may write it: COLLECTION/DOCUMENT."""
    return owner.replace(SEPARATOR, "/")


def document_of(owner: str) -> str:
    """Return the document's own name in an owner's."""
    return owner.rpartition(SEPARATOR)[2]
