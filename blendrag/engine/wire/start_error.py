"""The error that a worker failed with at its start. vLLM tells its client only that one failed, and logs the
error in the worker; so it goes through a file."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from pydantic import ValidationError

VARIABLE = "BLENDRAG__START_ERROR"  # the file, in the environment of a worker


def file_in(folder: str) -> Path:
    """Return the error file of an engine whose sockets are in this folder."""
    return Path(folder) / "start_error"


class _Keeper(logging.Handler):
    """A log handler that writes the last error logged to a file."""

    def __init__(self, file: Path) -> None:
        super().__init__(logging.ERROR)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._file.write_text(one_line(record.exc_info[1]), encoding="utf-8")


def keep(logger: logging.Logger) -> None:
    """Write errors that are logged by ``logger`` to the file from now on."""
    if VARIABLE in os.environ:
        logger.addHandler(_Keeper(Path(os.environ[VARIABLE])))


def kept(folder: str) -> str | None:
    """Return the error that was written; None if there is none."""
    file = file_in(folder)
    return file.read_text(encoding="utf-8") if file.is_file() else None


def one_line(error: BaseException) -> str:
    """Return the error's message without line breaks, or its class name."""
    message = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
    return " ".join(message.split()) or type(error).__name__
