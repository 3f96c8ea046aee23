"""Mooncake's traces: times, lengths, and hashes of blocks, in JSON Lines."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blendrag.errors import SourceError
from blendrag.replay.lines import numbered_lines, wrong_line
from blendrag.replay.request import Request, Trace

BLOCK = 512  # tokens


class _Record(BaseModel):
    """timestamp: milliseconds. hash_ids: of the prompt's blocks; each depends on all before it."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    timestamp: float = Field(ge=0)
    input_length: int = Field(gt=0)
    output_length: int = Field(default=0, ge=0)
    hash_ids: list[int] = Field(min_length=1)


def read_mooncake(path: Path) -> Trace:
    """One request per line. Its last block may be shorter than the others. Answers have no blocks.

    Raises SourceError, naming file and line, for what is no such record, for lengths that do not fit the
    number of blocks, for times that run backwards, and for a file without requests.
    """
    requests: list[Request] = []
    for number, line in numbered_lines(path):
        try:
            record = _Record.model_validate_json(line)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in problem["loc"])
            why = f"{where}: {problem['msg']}" if where else problem["msg"]
            raise wrong_line(path, number, why) from None
        at, full = record.timestamp / 1000.0, len(record.hash_ids) - 1
        last = record.input_length - BLOCK * full
        if not 0 < last <= BLOCK:
            count = f"{full + 1} blocks of {BLOCK} tokens"
            raise wrong_line(path, number, f"input_length: {record.input_length} tokens are not {count}")
        if requests and at < requests[-1].at:
            raise wrong_line(path, number, "timestamp: earlier than that of the line before")
        keys, sizes = tuple(map(str, record.hash_ids)), (BLOCK,) * full + (last,)
        requests.append(Request(at, keys, sizes, answered=record.output_length))
    if not requests:
        raise SourceError(f"{str(path)!r} holds no requests")
    return Trace(path.name, requests, prefix=True, unit="blocks")
