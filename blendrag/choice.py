"""The way a choice of an axis is written, wherever it is: ``hkvd@0.15:metric=k``, ``512:ada:alpha=0.2``.

A name, ``@`` and a number, then, each behind a colon, words and arguments. What stands behind the name is up
to the axis; each implementation declares its arguments, in its own file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any

from blendrag.errors import ConfigError
from blendrag.names import closest

Reader = Callable[[str], Any]
"""A function that reads an argument's value. Raises ValueError that says what it must be."""

_MARKS = ":=@,"  # the comma separates arms


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice as it was written. at: the number behind ``@``. words: parts without a value; arguments: those
    with one."""

    name: str
    at: float | None = None
    words: tuple[str, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> Choice:
        """Read a choice. Raises ConfigError for what is none, and for an argument that is given twice."""
        head, *parts = text.split(":")
        name, mark, number = head.partition("@")
        words, arguments = [], dict[str, str]()
        for part in parts:
            argument, equals, value = part.partition("=")
            if not equals:
                words.append(part)
            elif argument in arguments:
                raise ConfigError(f"{text!r} says {argument} twice")
            else:
                arguments[argument] = value
        behind = (*words, *arguments, *arguments.values())
        if not all(behind) or any(sign in each for each in (name, *behind) for sign in _MARKS):
            raise ConfigError(f"{text!r} is not written as in hkvd@0.15:metric=k")
        try:
            at = float(number) if mark else None
        except ValueError:
            raise ConfigError(f"{text!r}: {number!r} is not a number") from None
        return cls(name, at, tuple(words), arguments)

    def __str__(self) -> str:
        at = "" if self.at is None else f"@{written(self.at)}"
        given = (f"{name}={value}" for name, value in self.arguments.items())
        return ":".join((self.name + at, *self.words, *given))

    def read_arguments(self, axis: str, *declared: Mapping[str, Reader]) -> tuple[dict[str, Any], ...]:
        """Return the values of the arguments, for each of those who declare some. Raises ConfigError for one
        that nobody does, and for a value that cannot be used."""
        known = {name for each in declared for name in each}
        for name in self.arguments.keys() - known:
            there_are = f"; there are {', '.join(sorted(known))}" if known else ""
            raise ConfigError(
                f"{axis} {str(self)!r}: unknown argument {name!r}{there_are}{closest(name, known)}"
            )
        return tuple(
            {name: self._value(axis, name, each[name]) for name in self.arguments if name in each}
            for each in declared
        )

    def _value(self, axis: str, name: str, reader: Reader) -> Any:
        try:
            return reader(self.arguments[name])
        except ValueError as error:
            raise ConfigError(
                f"{axis} {str(self)!r}: {name} must be {error}, not {self.arguments[name]!r}"
            ) from None


def written(number: float) -> str:
    """Return the shortest text that is read as this number."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def one_of(*names: str) -> Reader:
    """Return a reader of one of these names."""

    def read(text: str) -> str:
        if text not in names:
            raise ValueError(" or ".join(names))
        return text

    return read


def number(most: float = inf) -> Reader:
    """Return a reader of a number from 0 to ``most``."""

    def read(text: str) -> float:
        with suppress(ValueError):
            if 0.0 <= (value := float(text)) <= most:
                return value
        raise ValueError("0 or more" if most == inf else f"between 0 and {most:g}")

    return read


def count(text: str) -> int:
    """Read a whole number, at least 1."""
    if not text.isdecimal() or not int(text):
        raise ValueError("a whole number, at least 1")
    return int(text)


def yes_or_no(text: str) -> bool:
    """Read ``yes`` or ``no``."""
    return bool(one_of("yes", "no")(text) == "yes")


def layers(text: str) -> tuple[int, ...]:
    """Read ascending numbers of layers, from 1: layer 0 never deviates."""
    with suppress(ValueError):
        value = tuple(map(int, text.split("+")))
        if min(value) >= 1 and list(value) == sorted(set(value)):
            return value
    raise ValueError("ascending layers from 1, as in 1+4+8")
