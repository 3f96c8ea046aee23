"""The questions of an evaluation: the records of a file, of which some are chosen at random."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from blendrag.errors import SourceError
from blendrag.index.formats import Unusable, decode
from blendrag.lab.evaluate.formats import FORMATS, Format, Question

_GZIP_MAGIC = b"\x1f\x8b"


def read_questions(path: Path, format: Format, limit: int | None = None, seed: int = 0) -> list[Question]:
    """Up to ``limit`` questions of a file, in a random order that takes from all groups (articles) in turn.

    The same file, format and seed give the same questions; a larger limit adds to them.
    Raises SourceError, naming the file and the line, and the format that fits where another does.
    """
    records = [
        _record(path, format, place, value, number)
        for number, (place, value) in enumerate(read_records(path), start=1)
    ]
    groups = list(format.questions(records, seed, format.documents or 0))
    seen: set[str] = set()
    for id in (question.id for group in groups for question in group):
        if id in seen:  # an id names a question's samples
            raise SourceError(f"{str(path)!r}: two questions have the id {id!r}")
        seen.add(id)
    if not seen:
        raise SourceError(f"{str(path)!r} has no question with an answer")
    return list(islice(_spread(groups, seed), limit))


def read_records(path: Path) -> list[tuple[str, Any]]:
    """The items of a JSON list or the lines of JSON Lines, gzipped or not, and where each is ("line 3").

    A file whose first line is an object by itself is JSON Lines. SQuAD's outer object is looked through.
    Raises SourceError, naming the file and the line.
    """
    text = _read(path)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if lines and _is_object(lines[0][1]):
        found = [(f"line {number}", _parse(path, line, number)) for number, line in lines]
        if len(found) > 1 or "data" not in found[0][1]:
            return found
    whole = _parse(path, text, 1)
    items = whole.get("data") if isinstance(whole, dict) else whole
    if not isinstance(items, list):
        raise SourceError(f"{str(path)!r}: neither a list nor lines of JSON objects")
    return [(f"item {number}", item) for number, item in enumerate(items, start=1)]


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
        return decode(gzip.decompress(data) if data.startswith(_GZIP_MAGIC) else data)
    except (OSError, EOFError, zlib.error, Unusable) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise SourceError(f"cannot read {str(path)!r}: {reason}") from error


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _parse(path: Path, text: str, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise SourceError(f"{str(path)!r}, line {line}: not JSON ({error.msg})") from error


def _record(path: Path, format: Format, place: str, value: Any, number: int) -> BaseModel:
    """number: of the record in the file, from 1."""
    numbered = {**value, "number": number} if isinstance(value, dict) else value
    try:
        return format.record.model_validate(numbered)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        reason = f"{field}: {first['msg']}" if field else first["msg"]
        fitting = [name for name, other in FORMATS.items() if number == 1 and _fits(other, numbered)]
        hint = f"; it fits --format {' or '.join(fitting)}" if fitting else ""
        message = f"{str(path)!r}, {place}, is not in the format {format.name}: {reason}{hint}"
        raise SourceError(message) from None


def _fits(format: Format, value: Any) -> bool:
    try:
        format.record.model_validate(value)
    except ValidationError:
        return False
    return True


def _spread(groups: Iterable[Sequence[Question]], seed: int) -> Iterator[Question]:
    """One question of every group, then another of every group, and so on."""
    rng = random.Random(seed)
    mixed = [rng.sample(group, len(group)) for group in groups]
    rng.shuffle(mixed)
    for one_of_each in zip_longest(*mixed):
        yield from (question for question in one_of_each if question is not None)
