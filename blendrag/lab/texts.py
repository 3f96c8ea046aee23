"""Real text to measure with, which every machine has."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from blendrag.errors import ConfigError
from blendrag.prompt import encode_document

Encode = Callable[[str], Sequence[int]]

_IS_LICENCE = re.compile(r"(LICEN[CS]E|COPYING)[^/]*$", re.IGNORECASE)
_BADGE = re.compile(r"^\s*(\[?!\[|\.\. (image|_|\|)|:\w+:|<).*$\n?", re.MULTILINE)  # links and pictures


def package_names() -> list[str]:
    """Return the names of installed packages, each once."""
    names = (dist.name for dist in metadata.distributions())  # each is read from a file
    return sorted({str(name).lower() for name in names if name})


def description(package: str) -> str:
    """Return what a package says of itself; "" if nothing."""
    return str(metadata.metadata(package)["Description"] or "").strip()


def licences(package: str) -> Iterator[str]:
    """Yield the package's licence files."""
    for file in metadata.files(package) or ():
        if _IS_LICENCE.search(str(file)):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                yield Path(str(file.locate())).read_text(encoding="utf-8").strip()


def installed_texts() -> Iterator[str]:
    """Yield descriptions, then licences, of the installed packages."""
    names = package_names()
    for name in names:
        yield _BADGE.sub("", description(name)).strip()
    for name in names:
        yield from licences(name)


def cut_chunks(
    texts: Iterable[str], encode: Encode, chunk_tokens: int, *, least: int, most: int
) -> list[tuple[int, ...]]:
    """Return up to ``most`` different chunks of exactly ``chunk_tokens`` tokens.

    First the first chunk of every text, then the second of every text, and so on: chunks of one prompt
    should be about different things, as retrieved ones are. Raises ConfigError for fewer than ``least``.
    """
    found: dict[tuple[int, ...], None] = {}
    rest: list[Sequence[int]] = []
    for text in texts:
        if len(found) >= most:
            break
        ids = encode(text)
        if len(ids) >= chunk_tokens:
            found[tuple(ids[:chunk_tokens])] = None
            rest.append(ids[chunk_tokens:])
    while len(found) < most and rest:
        rest = [ids for ids in rest if len(ids) >= chunk_tokens]
        found.update(dict.fromkeys(tuple(ids[:chunk_tokens]) for ids in rest))
        rest = [ids[chunk_tokens:] for ids in rest]
    if len(found) < least:
        raise ConfigError(
            f"the text gives {len(found)} different chunks of {chunk_tokens} tokens, and {least} are needed:"
            " ask for fewer or smaller chunks"
        )
    return list(found)[:most]


def text_pieces(tokenizer: Any, count: int, tokens: int, least: int | None = None) -> list[tuple[int, ...]]:
    """Return ``count`` different chunks of real text: which tokens deviate, and how scattered they are,
    depends on it. least: so many are enough. Raises ConfigError if there is too little text."""
    encode = partial(encode_document, tokenizer)
    return cut_chunks(installed_texts(), encode, tokens, least=least or count, most=count)
