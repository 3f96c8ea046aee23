"""Lines of trace files, gzipped or not."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import ValidationError

from blendrag.errors import SourceError

_GZIP_MAGIC = b"\x1f\x8b"


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, line) of those that are not blank. Raises SourceError, naming the last line that could be
    read."""
    number = 0
    try:
        with path.open("rb") as file:
            magic = file.read(2)
            file.seek(0)
            lines: Iterable[bytes] = gzip.GzipFile(fileobj=file) if magic == _GZIP_MAGIC else file
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        where = f" after line {number}" if number else ""
        raise SourceError(f"cannot read {str(path)!r}{where}: {reason}") from error


def wrong_line(path: Path, number: int, why: str) -> SourceError:
    """The error that names a line."""
    return SourceError(f"{str(path)!r}, line {number}: {why}")


def problem_of(error: Exception) -> str:
    """In a line: where a record is not what it should be first, and what is wrong there."""
    if not isinstance(error, ValidationError):
        return str(error)
    problem = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where}: {problem['msg']}" if where else problem["msg"]
