"""Names of owners: a document of a collection, or a document of an index under its own name."""

from __future__ import annotations

# Begins the names of collections that end with their process; what they leave behind is released later.
VOLATILE = "volatile:"
_SEPARATOR = "\x1f"


def owner_of(collection: str, document: str) -> str:
    """The owner that stands for a document; with ``""`` for the document, what all the names begin with."""
    return f"{collection}{_SEPARATOR}{document}"


def document_of(owner: str) -> str:
    """The document's own name in an owner's."""
    return owner.rpartition(_SEPARATOR)[2]
