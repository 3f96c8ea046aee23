"""Real text to measure with: what every machine has, or a file of the user's."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from blendrag.errors import ConfigError, SourceError
from blendrag.lab.records import read_records, read_text
from blendrag.prompt import encode_document
from blendrag.prompt.template import decode as decode_tokens

_SLACK = 16  # tokens

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


def file_texts(path: Path) -> list[str]:
    """Return the texts in ``path``: a whole text file, or per record of a ``.jsonl`` file its field ``text``
    (one text) or ``documents`` (several texts, or objects with a ``text``).

    Raises SourceError, naming the file and the line.
    """
    if path.suffix.lower() not in (".jsonl", ".ndjson"):
        return [read_text(path)]
    texts: list[str] = []
    for place, record in read_records(path):
        try:
            texts += _texts_of(record)
        except ValueError as error:
            raise SourceError(f"{str(path)!r}, {place}: {error}") from error
    return texts


def _texts_of(record: Any) -> list[str]:
    if not isinstance(record, dict) or not record.keys() & {"text", "documents"}:
        raise ValueError("not an object with a field 'text' or 'documents'")
    texts = [record["text"]] if "text" in record else record["documents"]
    texts = texts if isinstance(texts, list) else [texts]
    texts = [item.get("text") if isinstance(item, dict) else item for item in texts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("'text' must be a text, 'documents' a list of texts or of objects with a 'text'")
    return texts


def cut_chunks(
    texts: Iterator[str] | Sequence[str], encode: Encode, chunk_tokens: int, *, least: int, most: int
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
            " give more text (--data), or ask for fewer or smaller chunks"
        )
    return list(found)[:most]


def text_pieces(
    tokenizer: Any, count: int, tokens: int, texts: Sequence[str] | None = None, least: int | None = None
) -> list[tuple[int, ...]]:
    """Return ``count`` different chunks of real text: which tokens deviate, and how scattered they are,
    depends on it. texts: others than those of the installed packages. least: so many are enough.

    Raises ConfigError if there is too little text.
    """

    def encode(text: str) -> Sequence[int]:
        return encode_document(tokenizer, text)

    source = installed_texts() if texts is None else texts
    return cut_chunks(source, encode, tokens, least=count if least is None else least, most=count)


def questions_of(tokenizer: Any, tokens: int) -> list[str]:
    """Return up to eight texts of exactly ``tokens`` tokens, to stand where the question does.

    Raises ConfigError if the installed packages have too little text.
    """
    found = []
    for ids in text_pieces(tokenizer, 8, tokens + _SLACK):
        for end in range(tokens, tokens + _SLACK + 1):  # what is decoded and stripped may be other tokens
            text = decode_tokens(tokenizer, ids[:end]).strip()
            if len(encode_document(tokenizer, text)) == tokens:
                found.append(text)
                break
    if not found:
        raise ConfigError(f"the text gives no question of {tokens} tokens: ask for more")
    return found
