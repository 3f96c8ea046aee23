"""Readers of Mooncake's traces and stores' logs, of Azure's times, of dialogues and of question sets."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blendrag.errors import SourceError
from blendrag.lab.eviction.trace import Request, RequestTrace
from blendrag.lab.records import numbered_lines, problem_of, read_records

_BLOCK = 512  # tokens, of Mooncake's
AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


def _wrong_line(path: Path, number: int, why: str) -> SourceError:
    """The error that names a line."""
    return SourceError(f"{str(path)!r}, line {number}: {why}")


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
        last = self.input_length - _BLOCK * (count - 1)
        if not 0 < last <= _BLOCK:
            wanted = f"{count} blocks of {_BLOCK} tokens"
            raise ValueError(f"input_length: {self.input_length} tokens are not {wanted}")
        return (_BLOCK,) * (count - 1) + (last,)


def read_mooncake(path: Path, *more: Path) -> RequestTrace:
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
                raise _wrong_line(part, number, problem_of(error)) from None
            if independent is None:
                independent = record.independent
            if record.independent != independent:
                raise _wrong_line(part, number, "independent: not as in the lines before")
            at = record.timestamp / 1000.0
            if requests and at < requests[-1].at and not independent:
                raise _wrong_line(part, number, "timestamp: earlier than that of the line before")
            whose = None if record.conversation is None else str(record.conversation)
            keys = tuple(map(str, record.hash_ids))
            requests.append(Request(at, keys, sizes, conversation=whose))
    if not requests:
        raise SourceError(f"{str(path)!r} holds no requests")
    if independent:
        return RequestTrace(path.name, _from_zero(requests), prefix=False, unit="tokens")
    return RequestTrace(path.name, requests, prefix=True, unit="blocks")


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


def read_azure(path: Path) -> list[float]:
    """When requests came, seconds since the first: what was in them has to be drawn (:mod:`.workloads`).

    Raises SourceError, naming file and line, for what is no such record, for times that run backwards, and
    for a file without requests.
    """
    arrivals: list[float] = []
    first: datetime | None = None
    for number, line in numbered_lines(path):
        try:
            row = next(csv.reader([line.decode("utf-8-sig")]))
            if number == 1 and row == AZURE_COLUMNS:
                continue
            stamp, *tokens = row
            # seven digits of a second: one more than Python knows
            time = datetime.fromisoformat(stamp[:26])
            first = first or time
            at = (time - first).total_seconds()
            if len(tokens) != 2 or min(map(int, tokens)) < 0:
                raise ValueError("not two numbers of tokens")
        except (ValueError, TypeError, csv.Error) as error:
            raise _wrong_line(path, number, f"not {', '.join(AZURE_COLUMNS)}: {error}") from None
        if arrivals and at < arrivals[-1]:
            raise _wrong_line(path, number, "TIMESTAMP: earlier than that of the line before")
        arrivals.append(at)
    if not arrivals:
        raise SourceError(f"{str(path)!r} holds no requests")
    return arrivals


class DialogTurn(BaseModel):
    """What one side said. ``at``: seconds, where they are known."""

    model_config = ConfigDict(frozen=True)

    role: str
    text: str
    at: float | None = None


class Dialog(BaseModel):
    """A conversation; what else its record holds is ignored."""

    model_config = ConfigDict(frozen=True, coerce_numbers_to_str=True)

    id: str = Field(min_length=1)
    turns: tuple[DialogTurn, ...]

    @property
    def prompts(self) -> tuple[str, ...]:
        """What the user said, oldest first."""
        return tuple(turn.text for turn in self.turns if turn.role == "user")


def read_dialogs(path: Path) -> list[Dialog]:
    """The conversations of a JSON Lines file, gzipped or not.

    Raises SourceError, naming file and line, for what is no ``{"id": ..., "turns": [{"role", "text"}]}``, and
    for a file without conversations.
    """
    dialogs = []
    for number, line in numbered_lines(path):
        try:
            dialogs.append(Dialog.model_validate_json(line))
        except ValidationError as error:
            raise _wrong_line(path, number, problem_of(error)) from None
    if not dialogs:
        raise SourceError(f"{str(path)!r} holds no conversations")
    return dialogs


class _Asked(BaseModel):
    question: str


class _Paragraph(BaseModel):
    context: str
    qas: list[_Asked]


class _Article(BaseModel):
    paragraphs: list[_Paragraph]


@dataclass(frozen=True, slots=True)
class Questions:
    """A corpus and what is asked of it. paragraphs: each text once. asked: of each article, its questions."""

    paragraphs: tuple[str, ...]
    asked: tuple[tuple[str, ...], ...]


def read_questions(path: Path, most: int | None = None) -> Questions:
    """SQuAD's JSON, gzipped or not, with or without its outermost ``{"data": ...}``; of the first ``most``
    articles. Raises SourceError."""
    articles = []
    for place, record in read_records(path)[:most]:
        try:
            articles.append(_Article.model_validate(record))
        except ValidationError as error:
            raise SourceError(
                f"{str(path)!r} has neither hash_ids nor turns, and is no question set in SQuAD's format:"
                f" {place}: {problem_of(error)}"
            ) from error
    asked = tuple(
        questions
        for article in articles
        if (questions := tuple(q.question for paragraph in article.paragraphs for q in paragraph.qas))
    )
    if not asked:
        raise SourceError(f"{str(path)!r} has no questions")
    return Questions(tuple(dict.fromkeys(p.context for a in articles for p in a.paragraphs)), asked)
