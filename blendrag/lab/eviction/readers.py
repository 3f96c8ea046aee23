"""Readers of Mooncake's traces, of our own log and of dialogues."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blendrag.errors import SourceError
from blendrag.forecast.log import PromptLog
from blendrag.lab.eviction.trace import Request, RequestTrace
from blendrag.lab.records import numbered_lines, problem_of, wrong_line

_BLOCK = 512  # tokens, of Mooncake's


class _Record(BaseModel):
    """A record of Mooncake's. timestamp: milliseconds. hash_ids: of the prompt's blocks; each depends on all
    before it."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    timestamp: float = Field(ge=0)
    input_length: int = Field(gt=0)
    hash_ids: list[int] = Field(min_length=1)


def read_mooncake(path: Path) -> RequestTrace:
    """Read Mooncake's trace, one request per line. Its last block may be shorter than the others. Answers
    have no blocks.

    Raises SourceError, naming file and line, for what is no such record, for lengths that do not fit, for
    times that run backwards, and for a file without requests.
    """
    requests: list[Request] = []
    for number, line in numbered_lines(path):
        try:
            record = _Record.model_validate_json(line)
        except ValueError as error:
            raise wrong_line(path, number, problem_of(error)) from None
        at, count = record.timestamp / 1000.0, len(record.hash_ids)
        last = record.input_length - _BLOCK * (count - 1)
        if not 0 < last <= _BLOCK:
            wanted = f"{count} blocks of {_BLOCK} tokens"
            raise wrong_line(path, number, f"input_length: {record.input_length} tokens are not {wanted}")
        if requests and at < requests[-1].at:
            raise wrong_line(path, number, "timestamp: earlier than that of the line before")
        requests.append(Request(at, tuple(map(str, record.hash_ids)), (_BLOCK,) * (count - 1) + (last,)))
    if not requests:
        raise SourceError(f"{str(path)!r} holds no requests")
    return RequestTrace(path.name, requests, prefix=True, unit="blocks")


def read_log(path: Path) -> RequestTrace:
    """Read the prompts of the store that had most of them, from blendrag's own log: chunks that are found one
    by one. Raises PredictorError, SourceError where there are none."""
    log = PromptLog(path, make=False)
    prompts = log.prompts()
    log.close()
    if not prompts:
        raise SourceError(f"{str(path)!r} holds no prompts yet")
    last = {prompt.conversation: number for number, prompt in enumerate(prompts)}
    requests = [
        Request(
            prompt.at - prompts[0].at,
            tuple(key for key, _ in prompt.chunks),
            tuple(size for _, size in prompt.chunks),
            conversation=prompt.conversation,
            continues=None if prompt.conversation is None else last[prompt.conversation] > number,
        )
        for number, prompt in enumerate(prompts)
    ]
    return RequestTrace(path.name, requests, prefix=False, unit="tokens")


class DialogTurn(BaseModel):
    """A turn of a dialogue: what one side said. ``at``: seconds, where they are known."""

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
        """The user's prompts, oldest first."""
        return tuple(turn.text for turn in self.turns if turn.role == "user")


def read_dialogs(path: Path) -> list[Dialog]:
    """Return the conversations of a JSON Lines file, gzipped or not.

    Raises SourceError, naming file and line, for what is no ``{"id": ..., "turns": [{"role", "text"}]}``, and
    for a file without conversations.
    """
    dialogs = []
    for number, line in numbered_lines(path):
        try:
            dialogs.append(Dialog.model_validate_json(line))
        except ValidationError as error:
            raise wrong_line(path, number, problem_of(error)) from None
    if not dialogs:
        raise SourceError(f"{str(path)!r} holds no conversations")
    return dialogs
