"""The error of a worker that does not start, on its way to the client. No engine is started here."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from blendrag.engine.wire import start_error


def test_error_that_a_worker_logs_reaches_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(start_error.VARIABLE, str(start_error.file_in(str(tmp_path))))
    above = logging.getLogger("test_start_error")
    start_error.keep(above)
    assert start_error.kept(str(tmp_path)) is None
    below = above.getChild("executor")
    below.error("not an exception")
    try:
        raise ValueError("no kernel. Reasons:\n A needs AMX\n B needs a GPU")
    except ValueError:
        below.exception("a worker failed to start")
    assert start_error.kept(str(tmp_path)) == "no kernel. Reasons: A needs AMX B needs a GPU"


def test_process_that_is_no_worker_of_ours_writes_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(start_error.VARIABLE, raising=False)
    logger = logging.getLogger("test_start_error.elsewhere")
    start_error.keep(logger)
    assert not logger.handlers


def test_error_is_shown_in_one_line() -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(int).validate_python("many")
    assert start_error.one_line(caught.value).startswith("Input should be a valid integer")
    assert start_error.one_line(caught.value).count("\n") == 0
    assert start_error.one_line(MemoryError()) == "MemoryError"
