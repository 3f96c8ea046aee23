"""Mooncake's traces: times, lengths, and hashes of blocks, in JSON Lines; and the logs of our own stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from blendrag.errors import SourceError
from blendrag.lab.replay.lines import numbered_lines, problem_of, wrong_line
from blendrag.lab.replay.request import Request, Trace

BLOCK = 512  # tokens


class _Record(BaseModel):
    """timestamp: milliseconds. hash_ids: of the prompt's blocks; each depends on all before it.

    What Mooncake's traces do not have: independent: no, each is found by itself (chunks of documents). sizes:
    tokens of each; they need not be all of the prompt. conversation: whose prompt it is.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    timestamp: float = Field(ge=0)
    input_length: int = Field(gt=0)
    output_length: int = Field(default=0, ge=0)
    hash_ids: list[int] = Field(min_length=1)
    independent: bool = False
    sizes: list[Annotated[int, Field(gt=0)]] | None = None
    conversation: int | None = None

    def tokens(self) -> tuple[int, ...]:
        """Of each block. Raises ValueError for lengths that do not fit."""
        count = len(self.hash_ids)
        if self.sizes is not None:
            if len(self.sizes) != count or sum(self.sizes) > self.input_length:
                raise ValueError(f"sizes: not those of {count} blocks in {self.input_length} tokens")
            return tuple(self.sizes)
        last = self.input_length - BLOCK * (count - 1)
        if not 0 < last <= BLOCK:
            wanted = f"{count} blocks of {BLOCK} tokens"
            raise ValueError(f"input_length: {self.input_length} tokens are not {wanted}")
        return (BLOCK,) * (count - 1) + (last,)


def read_mooncake(path: Path, *more: Path) -> Trace:
    """One request per line. Its last block may be shorter than the others. Answers have no blocks.

    more: files that go on where the one before ends. Independent chunks are counted in tokens, and may stand
    in another order than they came in, as lines are written when prompts are answered; a last line that is
    still being written is left out. Raises SourceError, naming file and line, for what is no such record, for
    lengths that do not fit, for blocks whose times run backwards, and for files without requests.
    """
    requests: list[Request] = []
    independent: bool | None = None
    for part in (path, *more):
        for number, line in numbered_lines(part):
            try:
                record = _Record.model_validate_json(line)
                sizes = record.tokens()
            except ValueError as error:
                if independent and not line.endswith(b"\n"):
                    break
                raise wrong_line(part, number, problem_of(error)) from None
            if independent is None:
                independent = record.independent
            if record.independent != independent:
                raise wrong_line(part, number, "independent: not as in the lines before")
            at = record.timestamp / 1000.0
            if requests and at < requests[-1].at and not independent:
                raise wrong_line(part, number, "timestamp: earlier than that of the line before")
            whose = None if record.conversation is None else str(record.conversation)
            keys = tuple(map(str, record.hash_ids))
            requests.append(Request(at, keys, sizes, answered=record.output_length, conversation=whose))
    if not requests:
        raise SourceError(f"{str(path)!r} holds no requests")
    if independent:
        return Trace(path.name, _from_zero(requests), prefix=False, unit="tokens")
    return Trace(path.name, requests, prefix=True, unit="blocks")


def _from_zero(requests: Sequence[Request]) -> list[Request]:
    """In the order in which they came, since the first, and with what became of their conversations."""
    ordered = sorted(requests, key=lambda request: request.at)
    last = {request.conversation: number for number, request in enumerate(ordered)}
    return [
        replace(
            request,
            at=request.at - ordered[0].at,
            continues=None if request.conversation is None else last[request.conversation] > number,
        )
        for number, request in enumerate(ordered)
    ]
