"""The records of a file: the items of a JSON list, or the lines of JSON Lines; gzipped or not."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from blendrag.errors import SourceError
from blendrag.index.formats import Unusable, decode

_GZIP_MAGIC = b"\x1f\x8b"


def read_records(path: Path) -> list[tuple[str, Any]]:
    """Every record, and where it is ("line 3", "item 3").

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
