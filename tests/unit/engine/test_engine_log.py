"""Where an engine's processes print, and vLLM logs."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from blendrag.engine.client import engine_log
from blendrag.engine.client.engine_log import VARIABLE, log_there, open_log

TALKER = """
import os, sys
from blendrag.engine.client.engine_log import print_there
print_there()
print("printed", flush=True)
raise ValueError("a traceback")
"""


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)


def test_process_of_an_engine_says_nothing_on_the_terminal(tmp_path: Path) -> None:
    file = open_log(tmp_path / "cache")
    assert file is not None
    env = os.environ | {VARIABLE: str(file)}
    said = subprocess.run([sys.executable, "-c", TALKER], env=env, capture_output=True, text=True, timeout=60)
    assert (said.stdout, said.stderr) == ("", "")
    assert "printed" in file.read_text() and "ValueError: a traceback" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600


def test_client_logs_there_and_a_later_engine_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("of this test")
    logger.addHandler(logging.StreamHandler())
    handlers = []  # held, so that none is closed only because nobody has it
    for name in ("one", "other"):
        log_there(logger, tmp_path / name)
        logger.error("of %s", name)
        handlers += logger.handlers
    files = {Path(file.path).name for file in psutil.Process().open_files()}
    assert "other" in files and "one" not in files
    assert capsys.readouterr().err == ""
    assert [(tmp_path / name).read_text() for name in ("one", "other")] == ["of one\n", "of other\n"]


def test_handler_that_other_loggers_have_keeps_its_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, users, handler = logging.Logger("engine"), logging.Logger("users"), logging.StreamHandler()
    for logger in (engine, users):
        logger.addHandler(handler)
    log_there(engine, tmp_path / "one")
    engine.error("of vLLM")
    users.error("of the user")
    assert (capsys.readouterr().err, (tmp_path / "one").read_text()) == ("of the user\n", "of vLLM\n")


def test_log_that_cannot_be_opened_fails_neither_the_start_nor_what_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.Logger("engine")
    logger.addHandler(logging.StreamHandler())
    log_there(logger, tmp_path / "nowhere" / "one")
    logger.error("failed")
    assert "No such file" in capsys.readouterr().err


def test_form_of_vllms_that_names_the_process_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger, handler = logging.getLogger("of another test"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(vllm_process_name)s %(message)s"))
    logger.addHandler(handler)
    log_there(logger, tmp_path / "one")
    logger.error("failed")
    assert (capsys.readouterr().err, (tmp_path / "one").read_text()) == ("", "MainProcess failed\n")


def test_users_own_level_keeps_the_log_on_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    assert open_log(tmp_path) is None


def test_log_begins_again_when_it_is_long_and_elsewhere_where_none_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_log, "_MAX_BYTES", 3)
    file = open_log(tmp_path)
    assert file is not None
    file.write_text("long")
    assert open_log(tmp_path) == file
    assert (file.read_text(), file.with_suffix(".log.old").read_text()) == ("", "long")
    (tmp_path / "file").touch()
    other = open_log(tmp_path / "file")
    assert other is not None and other.is_file()
    other.unlink()
