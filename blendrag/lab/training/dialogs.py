"""Conversations from a file, and what each of their prompts teaches."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blendrag.errors import SourceError
from blendrag.forecast.window import Window

_GZIP_MAGIC = b"\x1f\x8b"


class Turn(BaseModel):
    """What one side said. ``at``: seconds, where they are known."""

    model_config = ConfigDict(frozen=True)

    role: str
    text: str
    at: float | None = None


class Dialog(BaseModel):
    """A conversation; what else its record holds is ignored."""

    model_config = ConfigDict(frozen=True, coerce_numbers_to_str=True)

    id: str = Field(min_length=1)
    turns: tuple[Turn, ...]

    @property
    def prompts(self) -> tuple[str, ...]:
        """What the user said, oldest first."""
        return tuple(turn.text for turn in self.turns if turn.role == "user")


@dataclass(frozen=True, slots=True)
class Example:
    """What is known when a prompt comes in, and whether another one follows."""

    dialog: str
    window: Window
    continues: bool


def read_dialogs(path: Path) -> list[Dialog]:
    """The conversations of a JSON Lines file, gzipped or not.

    Raises SourceError, naming file and line, for what is no ``{"id": ..., "turns": [{"role", "text"}]}``, and
    for a file without conversations.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(2)
            file.seek(0)
            lines: Iterable[bytes] = gzip.GzipFile(fileobj=file) if magic == _GZIP_MAGIC else file
            dialogs = [_dialog(path, n, line) for n, line in enumerate(lines, start=1) if line.strip()]
    except (OSError, EOFError, zlib.error) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise SourceError(f"cannot read {str(path)!r}: {reason}") from error
    if not dialogs:
        raise SourceError(f"{str(path)!r} holds no conversations")
    return dialogs


def examples(dialogs: Iterable[Dialog]) -> Iterator[Example]:
    """One per prompt: the prompts so far, and whether the user says anything after it (LPC section 3.2).

    Answers are left out, as are all facts that are only known when the conversation is over.
    """
    for dialog in dialogs:
        prompts = dialog.prompts
        for turns in range(1, len(prompts) + 1):
            yield Example(dialog.id, Window.of(prompts[:turns]), turns < len(prompts))


def _dialog(path: Path, number: int, line: bytes) -> Dialog:
    try:
        return Dialog.model_validate_json(line)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        says = f"{where}: {problem['msg']}" if where else problem["msg"]
        raise SourceError(f"{str(path)!r}, line {number}: {says}") from None
