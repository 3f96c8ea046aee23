"""Texts and values as tokenizers, SQLite and JSON take them, whatever a caller's program brought along."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import xxhash
from pydantic_core import to_jsonable_python

from blendrag.errors import ConfigError


def encodable(text: str) -> str:
    """Return ``text`` with halves of surrogate pairs joined, and each one left alone replaced by U+FFFD.

    They come out of PDFs, JSON escapes and file names, and no encoder takes them.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def hash_of(text: str) -> str:
    """Return the name of a text that can be encoded, in 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def plain(value: Any) -> Any:
    """Return ``value`` as plain JSON data, every text in it :func:`encodable`.

    Dates, UUIDs, decimals, sets and models become what pydantic writes for them; what it does not know
    becomes its ``str``. Raises ConfigError for what is nested too deeply, or holds itself.
    """
    try:
        return _plain(value)
    except RecursionError:
        raise ConfigError("a value is nested too deeply, or holds itself") from None


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(str.__str__(value))  # an Enum's text, not its name
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, Mapping):
        return {str(_plain(name)): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    try:
        written = to_jsonable_python(value, fallback=str, bytes_mode="base64")
    except ValueError as error:
        raise ConfigError(f"a {type(value).__name__} cannot be written as JSON: {error}") from None
    return _plain(written)
