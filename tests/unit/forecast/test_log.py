"""The log says what happened, hides what was read and who read it, stays small, and survives crashes."""

from __future__ import annotations

import json
import sqlite3
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.errors import PredictorError, SourceError
from blendrag.eviction import make_policy
from blendrag.forecast.conversation import Window
from blendrag.forecast.log import ENDED_AFTER_S, Prompt, PromptLog
from blendrag.lab.eviction.replay import replay
from blendrag.lab.eviction.source import open_source
from blendrag.lab.eviction.trace import read_log
from blendrag.lab.options import EvictionOptions
from forked import Forked
from word_embedder import WordEmbedder, features, say

NAME = "words"  # of the embedder
LATER = 3 * ENDED_AFTER_S
ONE = (("key-of-a-chunk", 100),)

KEYS = st.text(st.characters(), max_size=8)
PROMPTS = st.lists(
    st.tuples(
        st.integers(0, 10_000),  # milliseconds since the one before
        st.lists(st.tuples(KEYS, st.integers(1, 2000)), min_size=1, max_size=6, unique_by=lambda one: one[0]),
        st.none() | KEYS,
    ),
    min_size=1,
    max_size=8,
)


def opened(folder: Path) -> PromptLog:
    return PromptLog(folder / "log.sqlite")


def note(log: PromptLog, *prompts: Prompt, store: str = "store") -> None:
    log.record(store, prompts, [None] * len(prompts))


def outcomes(log: PromptLog) -> list[bool]:
    return log.outcomes(NAME).continues.tolist()


def count(log: PromptLog) -> int:
    (prompts,) = log._db.execute("SELECT COUNT(*) FROM prompts").fetchone()
    return int(prompts)


# -- what was used -------------------------------------------------------------------------------------------


@given(PROMPTS)
def test_what_was_noted_is_what_is_replayed(
    prompts: list[tuple[int, list[tuple[str, int]], str | None]],
) -> None:
    now, noted = 0.0, []
    for wait, chunks, conversation in prompts:
        now += wait / 1000.0
        noted.append(Prompt(now, tuple(chunks), conversation))
    with tempfile.TemporaryDirectory() as folder:
        log = opened(Path(folder))
        note(log, *noted)
        log.close()
        source = open_source(EvictionOptions(log.path, "1"))
        trace = source.trace(0)
    assert not trace.prefix and trace.unit == "tokens" and not source.generated
    names: dict[str, str] = {}
    for request, prompt in zip(trace.requests, noted, strict=True):
        assert request.sizes == tuple(size for _, size in prompt.chunks)
        for key, (name, _) in zip(request.keys, prompt.chunks, strict=True):
            assert names.setdefault(name, key) == key
        assert (request.conversation is None) == (prompt.conversation is None)
        assert request.at == pytest.approx(prompt.at - noted[0].at)
    assert len(set(names.values())) == len(names), "two names, one hash"


def test_log_can_be_replayed_chunk_by_chunk(tmp_path: Path) -> None:
    a, b, log = ("a", 300), ("b", 200), opened(tmp_path)
    for at, chunks in enumerate(((a, b), (b,), (b, a, b), (("c", 50), a))):
        note(log, Prompt(float(at), chunks))
    outcome = replay(read_log(log.path), make_policy("lru"), 500)
    assert outcome.asked.tolist() == [500, 200, 500, 350], "what stands twice in a prompt counts once"
    assert outcome.found.tolist() == [0, 200, 500, 300], "each chunk is found by itself, whatever its place"


def test_prompts_are_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    log = opened(tmp_path)
    for at, conversation in ((8.0, "y"), (9.0, "x"), (1.0, "x")):  # in that of their answers
        note(log, Prompt(at, ((str(at), 10),), conversation))
    requests = read_log(log.path).requests
    assert [request.at for request in requests] == [0.0, 7.0, 8.0]
    assert [request.conversation for request in requests] == [*map(log._hidden, "xyx")]


def test_store_with_the_most_prompts_is_replayed(tmp_path: Path) -> None:
    log = opened(tmp_path)
    note(log, *[Prompt(float(at), (("a", 1),)) for at in range(5)], store="quiet")
    note(log, *[Prompt(float(at)) for at in range(50)], store="nothing known")
    with pytest.raises(SourceError, match="no prompts"):
        read_log(opened(tmp_path / "empty").path)
    note(log, *[Prompt(float(at), (("b", 2),)) for at in range(9)], store="busy")
    assert [request.sizes for request in read_log(log.path).requests] == [(2,)] * 9


# -- what became of conversations ----------------------------------------------------------------------------


def test_outcomes_follow_from_what_came_later(tmp_path: Path) -> None:
    log = opened(tmp_path)
    say(log, features(), ("a", 0), ("b", 1), ("a", 50), ("a", 100 + ENDED_AFTER_S))
    # a went on, b's hour has passed, a's second came too late for its next, and a's last is open.
    assert outcomes(log) == [True, False, False]


def test_clock_that_runs_backwards_ends_nothing_early(tmp_path: Path) -> None:
    made, log = features(), opened(tmp_path)
    say(log, made, ("a", 10 * LATER), ("b", 10 * LATER), ("a", 5), ("c", 6))
    assert outcomes(log) == [True]  # a went on, however its times look; b and c may yet
    say(log, made, ("d", 12 * LATER))
    assert outcomes(log) == [True, False, False, False]


def test_reopened_log_goes_on_with_the_same_ids(tmp_path: Path) -> None:
    for at in (0.0, 10.0):
        log = opened(tmp_path)
        say(log, features(), ("a", at))
        log.close()
    assert outcomes(opened(tmp_path)) == [True]


def test_rows_of_another_embedder_are_not_mixed_in(tmp_path: Path) -> None:
    log = opened(tmp_path)
    say(log, features(), ("a", 0.0), ("b", LATER))
    with pytest.raises(PredictorError, match="no outcomes yet"):
        log.outcomes("others")
    same_name = features(WordEmbedder("words", width=7))  # changed under its name
    say(log, same_name, ("c", 2 * LATER), ("d", 4 * LATER))
    note(log, Prompt(5 * LATER, ONE, "e"))  # whose embedder failed
    assert log.outcomes(NAME).rows.shape == (1, 2 * 7 + 1)


# -- what is in the file, and how much -----------------------------------------------------------------------


def test_names_and_texts_cannot_be_read_from_the_file(tmp_path: Path) -> None:
    keys = []
    for folder in (tmp_path / "one", tmp_path / "other"):
        log = opened(folder)
        say(log, features(), ("conversation-of-ada", 0.0), prompt="a secret question")
        note(log, Prompt(1.0, ONE, "conversation-of-ada"), store="/home/ada/kb")
        keys.append(read_log(log.path).requests[0].keys)
        content = b"".join(path.read_bytes() for path in folder.iterdir())
        assert not any(word in content for word in (b"secret", b"ada", b"key-of", b"home"))
        assert folder.stat().st_mode & 0o077 == 0
        assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())
    assert keys[0] != keys[1], "another log has another key"


def test_log_does_not_grow_for_ever(tmp_path: Path) -> None:
    made, log = features(), PromptLog(tmp_path / "log.sqlite", capacity=100)
    for number in range(50):
        say(log, made, *((f"{number}-{each}", float(number)) for each in range(20)))
    assert count(log) == 100
    say(log, made, ("late", LATER * 2))
    assert outcomes(log) == [False] * 99


def test_file_of_a_full_log_keeps_its_size(tmp_path: Path) -> None:
    rows = list(np.repeat(features().rows([Window(("hi",), 1)]), 1_000, axis=0))

    def written(name: str, thousands: int) -> int:
        log = PromptLog(tmp_path / name, capacity=2_000)
        for number in range(thousands):  # a conversation for every prompt
            log.record(
                "s", [Prompt(float(number), ONE, f"{number}-{each}") for each in range(1_000)], rows, NAME
            )
        log.close()
        return log.path.stat().st_size

    assert written("long", 30) <= 1.5 * written("full", 3)


# -- what may go wrong ---------------------------------------------------------------------------------------


def test_threads_keep_each_others_lines(tmp_path: Path) -> None:
    """With a log of their own, and with one for two of them."""
    made, at_once = features(), 8
    begin = threading.Barrier(at_once)

    def write(name: str) -> PromptLog:
        begin.wait()
        log = opened(tmp_path)
        for at in range(20):
            say(log, made, (name, at))
        return log

    with ThreadPoolExecutor(at_once) as pool:
        logs = list(pool.map(write, map(str, range(at_once))))
        list(pool.map(lambda at: note(logs[0], Prompt(float(at), ONE)), range(100)))
    assert len({log._salt for log in logs}) == 1
    assert count(opened(tmp_path)) == 20 * at_once + 100
    for log in logs:
        log.close()


_WRITES = """
import os, sys
from pathlib import Path
from blendrag.forecast.log import Prompt, PromptLog
log = PromptLog(Path(sys.argv[1]))
for number in range(200):
    log.record("s", [Prompt(float(number), ((f"{sys.argv[2]} {number}", 100),))], [None])
os._exit(9)  # killed, with the log open
"""


def test_servers_of_one_engine_that_are_killed_leave_all_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    servers = [Forked(_WRITES, path, name) for name in "ab"]
    for server in servers:
        server.communicate(120)
    assert [server.returncode for server in servers] == [9, 9]
    assert len({request.keys for request in read_log(path).requests}) == 400


_SMALL_DISK = """
import json, resource, sys
from pathlib import Path
from blendrag.errors import PredictorError
from blendrag.forecast.log import Prompt, PromptLog
log, done = PromptLog(Path(sys.argv[1])), []
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
for number in range(40):
    try:
        log.record("s", [Prompt(float(number), tuple((f"{number}.{n}", 9) for n in range(40)))], [None])
        done.append(True)
    except PredictorError:
        done.append(False)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.record("s", [Prompt(99.0, (("last", 9),))], [None])
print(json.dumps(done))
"""


def test_full_disk_is_said_and_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    done = json.loads(Forked(_SMALL_DISK, path).finished())
    assert 0 < sum(done) < 40
    assert len(read_log(path).requests) == sum(done) + 1, "what came when there was room again"


def test_log_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PredictorError, match="cannot be used as a log"):
        PromptLog(tmp_path / "file" / "log.sqlite")
    (tmp_path / "log.sqlite").write_bytes(b"SQLite format 3\0 and nothing else" * 40)
    with pytest.raises(PredictorError, match=r"log\.sqlite"):
        open_source(EvictionOptions(tmp_path / "log.sqlite", "1"))


def test_database_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE chunks (key TEXT)")
        db.commit()
    with pytest.raises(PredictorError, match="cannot be used as a log"):
        open_source(EvictionOptions(path, "1"))
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("chunks",)]


def test_log_whose_maker_was_killed_is_named(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "log.sqlite")) as db:
        db.execute("CREATE TABLE key (salt BLOB NOT NULL)")
    with pytest.raises(PredictorError, match="cannot be used as a log"):
        PromptLog(tmp_path / "log.sqlite", make=False)
    opened(tmp_path).close()
    PromptLog(tmp_path / "log.sqlite", make=False).close()
