"""The rows of an evaluation: questions over documents, chosen at random from a file."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from blendrag.errors import SourceError
from blendrag.lab.evaluate.formats import FORMATS, Format, Row
from blendrag.lab.evaluate.formats.records import read_records

__all__ = ["Row", "read_rows"]


def read_rows(path: Path, format: Format, limit: int | None = None, seed: int = 0) -> list[Row]:
    """Up to ``limit`` rows of a file, in a random order that takes from all groups (articles) in turn.

    The same file, format and seed give the same rows; a larger limit adds rows to them.
    Raises SourceError, naming the file and the line, and the format that fits where another does.
    """
    records = [
        _record(path, format, place, value, number)
        for number, (place, value) in enumerate(read_records(path), start=1)
    ]
    groups = list(format.rows(records, seed, format.documents or 0))
    rows = list(islice(_spread(groups, seed), limit))
    if not rows:
        raise SourceError(f"{str(path)!r} has no question with an answer")
    _check_ids(path, groups)
    return rows


def _record(path: Path, format: Format, place: str, value: Any, number: int) -> BaseModel:
    try:
        return _validate(format, value, number)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        reason = f"{field}: {first['msg']}" if field else first["msg"]
        fitting = [name for name, other in FORMATS.items() if number == 1 and _fits(other, value)]
        hint = f"; it fits --format {' or '.join(fitting)}" if fitting else ""
        message = f"{str(path)!r}, {place}, is not in the format {format.name}: {reason}{hint}"
        raise SourceError(message) from None


def _validate(format: Format, value: Any, number: int) -> BaseModel:
    return format.record.model_validate({**value, "number": number} if isinstance(value, dict) else value)


def _fits(format: Format, value: Any) -> bool:
    try:
        _validate(format, value, 1)
    except ValidationError:
        return False
    return True


def _spread(groups: Iterable[Sequence[Row]], seed: int) -> Iterator[Row]:
    """One row of every group, then another of every group, and so on."""
    rng = random.Random(seed)
    mixed = [rng.sample(group, len(group)) for group in groups]
    rng.shuffle(mixed)
    for one_of_each in zip_longest(*mixed):
        yield from (row for row in one_of_each if row is not None)


def _check_ids(path: Path, groups: Iterable[Sequence[Row]]) -> None:
    """An id names a row's samples: two rows of one id would be taken for one."""
    seen: set[str] = set()
    for group in groups:
        for row in group:
            if row.id in seen:
                raise SourceError(f"{str(path)!r}: two questions have the id {row.id!r}")
            seen.add(row.id)
