"""Names of owners: a document of a collection, or a document of an index under its own name."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

VOLATILE = "volatile:"
_PROCESS = uuid.uuid4().hex  # process ids come again: in a container, all are 1
_SEPARATOR = "\x1f"


def owner_of(collection: str, document: str) -> str:
    """The owner that stands for a document; with ``""`` for the document, what all the names begin with."""
    return f"{collection}{_SEPARATOR}{document}"


def volatile(collection: str) -> str:
    """The name of a collection that ends with this process, as in-memory stores do."""
    return f"{VOLATILE}{_PROCESS}/{collection}"


def is_volatile(collection: str) -> bool:
    """Whether it ends with the process that named it."""
    return collection.startswith(VOLATILE)


def ended(owners: Iterable[str]) -> list[str]:
    """The owners among ``owners`` whose collections have ended with other processes."""
    ours = volatile("")
    return [owner for owner in owners if owner.startswith(VOLATILE) and not owner.startswith(ours)]


def document_of(owner: str) -> str:
    """The document's own name in an owner's."""
    return owner.rpartition(_SEPARATOR)[2]
