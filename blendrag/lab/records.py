"""The records of a file: a JSON list, or JSON Lines; gzipped or not.

What is wrong is a SourceError that names the file, and the line where there is one.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from blendrag.errors import ConfigError, SourceError
from blendrag.index.text import Unusable, decode
from blendrag.text import plain

Record = TypeVar("Record", bound=BaseModel)


def read_text(path: Path) -> str:
    """Return what is in a file. Raises SourceError for what is no text."""
    try:
        data = path.read_bytes()
        return decode(gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data)
    except (OSError, EOFError, zlib.error, Unusable) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise SourceError(f"cannot read {str(path)!r}: {reason}") from error


def numbered_lines(text: str) -> list[tuple[int, str]]:
    """Return (number, line) of the lines that are not blank."""
    return [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]


def read_records(path: Path) -> list[tuple[str, Any]]:
    """Return the items of a JSON list or the lines of JSON Lines, and where each is ("line 3").

    A file whose first line is an object by itself is JSON Lines. SQuAD's outer object is looked through.
    """
    text = read_text(path)
    lines = numbered_lines(text)
    if lines and fields_of(lines[0][1]) is not None:
        found = [(f"line {number}", _parse(path, line, number)) for number, line in lines]
        if len(found) > 1 or "data" not in found[0][1]:
            return found
    whole = _parse(path, text, 1)
    items = whole.get("data") if isinstance(whole, dict) else whole
    if not isinstance(items, list):
        raise SourceError(f"{str(path)!r}: neither a list nor lines of JSON objects")
    return [(f"item {number}", item) for number, item in enumerate(items, start=1)]


def fields_of(line: str) -> set[str] | None:
    """Return the names in a line that is a JSON object; None if it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return set(record) if isinstance(record, dict) else None


def records_of(path: Path, kind: type[Record]) -> Iterator[tuple[int, Record]]:
    """Yield (number, record) of JSON Lines, each as ``kind`` has it."""
    for number, line in numbered_lines(read_text(path)):
        try:
            yield number, kind.model_validate_json(line)
        except ValueError as error:
            raise wrong_line(path, number, problem_of(error)) from None


def wrong_line(path: Path, number: int, why: str) -> SourceError:
    """Return the error that names a line."""
    return SourceError(f"{str(path)!r}, line {number}: {why}")


def problem_of(error: Exception) -> str:
    """Say in a line where a record is not what it should be first, and what is wrong there."""
    if not isinstance(error, ValidationError):
        return str(error)
    problem = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where}: {problem['msg']}" if where else problem["msg"]


def _parse(path: Path, text: str, first_line: int) -> Any:
    try:
        return plain(json.loads(text))
    except (ValueError, RecursionError, ConfigError) as error:
        line, why = first_line, str(error)
        if isinstance(error, json.JSONDecodeError):
            line, why = first_line + error.lineno - 1, error.msg
        raise SourceError(f"{str(path)!r}, line {line}: not JSON ({why})") from error
