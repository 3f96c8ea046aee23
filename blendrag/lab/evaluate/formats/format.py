"""The format axis: how the rows of an evaluation are written in a file. One interface, one registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from blendrag.errors import ConfigError

SHORT_ANSWER = "Answer the question from the documents. Give the answer in a few words, and nothing else."


@dataclass(frozen=True, slots=True)
class Row:
    """A question over documents.

    id: the same in every run, and no other row's.
    answers: all that are right, as they are written; the first is the one whose likelihood is measured.
    documents: their texts, in the order of the prompt.
    choices: the only answers there are to a question that asks for a decision, such as yes and no.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Format:
    """How questions, answers and documents are found in a file, and how they are asked.

    record: one item of the file (of its list, or of a line); what does not fit it is another format.
    rows: from all records, the seed of every random choice, and ``documents``, to the rows, in groups that
        share documents (articles, say). Each row's choices depend on the seed and the row alone.
    system: the system prompt.
    cut: tokens that documents are cut into, each piece's KV computed apart; None leaves them whole.
    documents: how many a prompt has, where the format chooses them; None where the file does.
    """

    name: str
    record: type[BaseModel]
    rows: Callable[[Sequence[Any], int, int], Iterable[list[Row]]]
    system: str = SHORT_ANSWER
    cut: int | None = None
    documents: int | None = None


FORMATS: dict[str, Format] = {}


def register_format(format: Format) -> None:
    """Make a format available under its name."""
    FORMATS[format.name] = format


def find_format(name: str) -> Format:
    """The format called ``name``; ``kv:8``, say, is ``kv`` with 8 documents in a prompt.

    Raises ConfigError for an unknown name, or a number of documents where the file decides.
    """
    base, colon, count = name.partition(":")
    if base not in FORMATS:
        raise ConfigError(f"unknown format {base!r}; there are {', '.join(sorted(FORMATS))}")
    found = FORMATS[base]
    if not colon:
        return found
    if found.documents is None:
        raise ConfigError(f"format {name!r}: the documents of {base} are as many as the file has")
    if not (count.isascii() and count.isdigit() and int(count) > 0):
        raise ConfigError(f"format {name!r}: {count!r} is no number of documents")
    return replace(found, name=f"{base}:{int(count)}", documents=int(count))
