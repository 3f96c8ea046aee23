"""The log says what happened, hides who said what, and stays small."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from blendrag.errors import PredictorError
from blendrag.forecast.conversation import Window
from blendrag.forecast.outcome_log import ENDED_AFTER_S, OutcomeLog
from word_embedder import WordEmbedder, features, say

NAME = "words"  # of the embedder
LATER = 3 * ENDED_AFTER_S


def outcomes(log: OutcomeLog) -> list[bool]:
    return log.outcomes().continues.tolist()


def test_outcomes_follow_from_what_came_later(tmp_path: Path) -> None:
    made = features()
    log = OutcomeLog(tmp_path, NAME)
    say(log, made, ("a", 0), ("b", 1), ("a", 50), ("a", 100 + ENDED_AFTER_S))
    # a went on, b's hour has passed, a's second came too late for its next, and a's last is open.
    assert outcomes(log) == [True, False, False]


def test_clock_that_runs_backwards_ends_nothing_early(tmp_path: Path) -> None:
    made = features()
    log = OutcomeLog(tmp_path, NAME)
    say(log, made, ("a", 10 * LATER), ("b", 10 * LATER), ("a", 5), ("c", 6))
    assert outcomes(log) == [True]  # a went on, however its times look; b and c may yet
    say(log, made, ("d", 12 * LATER))
    assert outcomes(log) == [True, False, False, False]


def test_ids_and_texts_cannot_be_read_from_the_file(tmp_path: Path) -> None:
    made = features()
    log = OutcomeLog(tmp_path, NAME)
    say(log, made, ("conversation-of-ada", 0.0), prompt="a secret question")
    log.close()
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"secret" not in content and b"ada" not in content
    assert log.path.stat().st_mode & 0o077 == 0


def test_logs_of_several_processes_lose_each_others_lines(tmp_path: Path) -> None:
    """Servers of one engine begin at the same moment."""
    made, at_once = features(), 8
    begin = threading.Barrier(at_once)

    def write(name: str) -> bytes:
        begin.wait()
        log = OutcomeLog(tmp_path, NAME)
        for at in range(20):
            say(log, made, (name, at))
        log.close()
        return log._salt

    with ThreadPoolExecutor(at_once) as pool:
        salts = set(pool.map(write, map(str, range(at_once))))
    assert len(salts) == 1
    assert OutcomeLog(tmp_path, NAME).count() == 20 * at_once


def test_log_does_not_grow_for_ever(tmp_path: Path) -> None:
    made = features()
    log = OutcomeLog(tmp_path, NAME, capacity=100)
    for number in range(50):
        say(log, made, *((f"{number}-{each}", float(number)) for each in range(20)))
    assert log.count() == 100
    say(log, made, ("late", LATER * 2))
    assert outcomes(log) == [False] * 99


def test_file_of_a_full_log_grows_with_every_prompt(tmp_path: Path) -> None:
    made = features()
    rows = np.repeat(made.rows([Window(("hi",), 1)]), 1_000, axis=0)

    def written(name: str, thousands: int) -> int:
        log = OutcomeLog(tmp_path / name, NAME, capacity=2_000)
        for number in range(thousands):  # a conversation for every prompt
            log.record([f"{number}-{each}" for each in range(1_000)], [float(number)] * 1_000, rows)
        log.close()
        return log.path.stat().st_size

    assert written("long", 30) <= 1.5 * written("full", 3)


def test_reopened_log_goes_on_with_the_same_ids(tmp_path: Path) -> None:
    made = features()
    for at in (0.0, 10.0):
        log = OutcomeLog(tmp_path, NAME)
        say(log, made, ("a", at))
        log.close()
    assert outcomes(OutcomeLog(tmp_path, NAME)) == [True]


def test_rows_of_another_embedder_are_not_mixed_in(tmp_path: Path) -> None:
    made = features()
    say(OutcomeLog(tmp_path, NAME), made, ("a", 0.0), ("b", LATER))
    with pytest.raises(PredictorError, match="no outcomes yet"):
        OutcomeLog(tmp_path, "others").outcomes()
    same_name = features(embedder=WordEmbedder("words", width=7))  # changed under its name
    log = OutcomeLog(tmp_path, NAME)
    say(log, same_name, ("c", 2 * LATER), ("d", 4 * LATER))
    assert log.outcomes().rows.shape[1] == 2 * 7 + 3


def test_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PredictorError, match="log outcomes"):
        OutcomeLog(tmp_path / "file", NAME)
