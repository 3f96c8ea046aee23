"""The questions of an evaluation: the records of a file, of which some are chosen at random."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from blendrag.errors import SourceError
from blendrag.lab.evaluate.formats import FORMATS, Format, Question
from blendrag.lab.records import problem_of, read_records


def read_questions(path: Path, format: Format, limit: int | None = None, seed: int = 0) -> list[Question]:
    """Return up to ``limit`` questions of a file, in a random order that takes from all groups (articles) in
    turn.

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


def _record(path: Path, format: Format, place: str, value: Any, number: int) -> BaseModel:
    """Read a record. number: of the record in the file, from 1."""
    numbered = {**value, "number": number} if isinstance(value, dict) else value
    try:
        return format.record.model_validate(numbered)
    except ValidationError as error:
        fitting = [name for name, other in FORMATS.items() if number == 1 and _fits(other, numbered)]
        hint = f"; it fits --format {' or '.join(fitting)}" if fitting else ""
        message = f"{str(path)!r}, {place}, is not in the format {format.name}: {problem_of(error)}{hint}"
        raise SourceError(message) from None


def _fits(format: Format, value: Any) -> bool:
    try:
        format.record.model_validate(value)
    except ValidationError:
        return False
    return True


def _spread(groups: Iterable[Sequence[Question]], seed: int) -> Iterator[Question]:
    """Yield one question of every group, then another of every group, and so on."""
    rng = random.Random(seed)
    mixed = [rng.sample(group, len(group)) for group in groups]
    rng.shuffle(mixed)
    for one_of_each in zip_longest(*mixed):
        yield from (question for question in one_of_each if question is not None)
