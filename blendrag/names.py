"""Names that users give to implementations and to documents; and what a wrong one may stand for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar
from uuid import UUID

from blendrag.errors import ConfigError

T = TypeVar("T")


class Registry(dict[str, type[T]], Generic[T]):
    """A registry of an axis's implementations by name. Asking for an unknown one raises ConfigError."""

    def __init__(self, axis: str) -> None:
        """Begin with no implementation. axis: what implementations are called."""
        super().__init__()
        self._axis = axis

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Decorate a class: make it available under ``name``."""

        def register(cls: type[T]) -> type[T]:
            self[name] = cls
            return cls

        return register

    def unknown(self, name: str) -> str:
        """Say what is wrong with a name that is not registered."""
        return f"unknown {self._axis} {name!r}; there are {', '.join(sorted(self))}{closest(name, self)}"

    def __missing__(self, name: str) -> type[T]:
        raise ConfigError(self.unknown(name))


def closest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the end of a sentence about an unknown name: the one that it may stand for, and others as close.
    prefix: what all of them begin with, which is shown and makes none of them closer."""
    known = list(known)
    best = difflib.get_close_matches(name, known, n=1)
    matches = dict.fromkeys([*best, *difflib.get_close_matches(name, known, cutoff=0.7)])
    return f"; did you mean {'? or '.join(prefix + match for match in matches)}?" if matches else ""


def spellings(id: str) -> set[str]:
    """Return the forms of a document's id in which a vector store may give it back: a UUID's with dashes and
    without, in small letters and capitals; of any other the id alone."""
    try:
        uuid = UUID(id)
    except ValueError:
        return {id}
    return {id, str(uuid), uuid.hex, str(uuid).upper(), uuid.hex.upper()}
