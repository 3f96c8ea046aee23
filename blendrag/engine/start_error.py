"""What a worker failed with while it started. vLLM tells its client only that one did, and logs the error
where it happened; so it goes through a file."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from pydantic import ValidationError

VARIABLE = "BLENDRAG__START_ERROR"  # in the environment of a worker: which file


def file_in(folder: str) -> Path:
    """The one of an engine whose sockets are in this folder."""
    return Path(folder) / "start_error"


class _Keeper(logging.Handler):
    """Writes the last error that was logged."""

    def __init__(self, file: Path) -> None:
        super().__init__(logging.ERROR)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._file.write_text(one_line(record.exc_info[1]), encoding="utf-8")


def keep(logger: logging.Logger) -> None:
    """From now on, of what is logged there."""
    if VARIABLE in os.environ:
        logger.addHandler(_Keeper(Path(os.environ[VARIABLE])))


def kept(folder: str) -> str | None:
    """What was written there; None: nothing."""
    file = file_in(folder)
    return file.read_text(encoding="utf-8") if file.is_file() else None


def one_line(error: BaseException) -> str:
    """What it says, without line breaks, or its name."""
    said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
    return " ".join(said.split()) or type(error).__name__
