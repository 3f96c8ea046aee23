"""The log file of an embedded engine, with what its processes print and vLLM logs. The program's own errors
say what happened, so tracebacks go there and not to its terminal."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from blendrag.files.private import make_file, make_folder

VARIABLE = "BLENDRAG__LOG"  # the log file, in the environment of an engine's processes

_NAME = "engine.log"
_MAX_BYTES = 4 << 20  # a larger file is begun again


def open_log(cache_dir: Path) -> Path | None:
    """Return the log file of all engines below ``cache_dir``, for this user only; or one for this engine,
    where nothing can be written there. None where the user has chosen what vLLM logs, to see it on the
    terminal."""
    if "VLLM_LOGGING_LEVEL" in os.environ or "VLLM_LOGGING_CONFIG_PATH" in os.environ:
        return None
    file = cache_dir.expanduser().absolute() / _NAME
    try:
        make_folder(file.parent)
        make_file(file)
        if file.stat().st_size > _MAX_BYTES:
            file.replace(file.with_suffix(".log.old"))
            make_file(file)
    except OSError:
        descriptor, name = tempfile.mkstemp(prefix="blendrag-", suffix=f"-{_NAME}")
        os.close(descriptor)
        return Path(name)
    return file


def print_there() -> None:
    """Send what a new process of the engine and its libraries print to the file, if there is one."""
    if file := os.environ.get(VARIABLE):
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.close(descriptor)


def log_there(logger: logging.Logger, file: Path) -> None:
    """Send what ``logger`` would print in the engine's client to the file."""
    for handler in list(logger.handlers):
        to_a_file = isinstance(handler, logging.FileHandler) and not isinstance(handler, _LogFile)
        if isinstance(handler, logging.StreamHandler) and not to_a_file:
            logger.removeHandler(handler)
            there = _LogFile(file, encoding="utf-8", delay=True)
            there.setFormatter(handler.formatter)
            logger.addHandler(there)
            if isinstance(handler, _LogFile):
                handler.close()


class _LogFile(logging.FileHandler):
    """A handler class of our own, which tells a later engine which handlers to replace."""

    def emit(self, record: logging.LogRecord) -> None:
        record.__dict__.setdefault("vllm_process_name", record.processName)  # vLLM's formatters ask for it
        try:
            super().emit(record)
        except OSError:  # the file cannot be opened
            self.handleError(record)
