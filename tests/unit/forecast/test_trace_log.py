"""The log of a store's traffic can be replayed, hides what was read, stays small, and fails no request."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.errors import SourceError
from blendrag.eviction import make_policy
from blendrag.forecast.trace_log import LIMIT, TraceLog, parts, trace_path
from blendrag.lab.eviction.readers import read_mooncake
from blendrag.lab.eviction.replay import replay
from blendrag.lab.eviction.source import Workload, open_source
from blendrag.lab.eviction.trace import RequestTrace

Chunks = Sequence[tuple[str, int]]
ONE: Chunks = [("key-of-a-chunk", 100)]


def logged(
    path: Path, *prompts: tuple[float, Chunks], limit: int = LIMIT, conversation: str | None = None
) -> RequestTrace:
    """A trace of prompts at these times, of a program that ran once."""
    times = iter([prompts[0][0], *(at for at, _ in prompts)])
    log = TraceLog(path, limit=limit, clock=lambda: next(times))
    for _, chunks in prompts:
        log.note(chunks, 500, 20, conversation)
    log.close()
    assert log.counts.written == len(prompts) and not log.counts.failed
    return read_mooncake(*parts(path))


def times(trace: RequestTrace) -> list[float]:
    return [request.at for request in trace.requests]


KEYS = st.text(st.characters(), max_size=8)
PROMPTS = st.lists(
    st.tuples(
        st.integers(0, 10_000),  # milliseconds since the one before
        st.lists(st.tuples(KEYS, st.integers(1, 2000)), min_size=1, max_size=6, unique_by=lambda one: one[0]),
        st.integers(0, 3000),
        st.none() | KEYS,
    ),
    min_size=1,
    max_size=8,
)


@given(PROMPTS)
def test_what_was_noted_is_not_what_is_read(prompts: list[tuple[int, Chunks, int, str | None]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, now = Path(folder) / "trace.jsonl", 0.0
        log = TraceLog(path, clock=lambda: now)
        for wait, chunks, answer, conversation in prompts:
            now += wait / 1000.0
            log.note(chunks, sum(size for _, size in chunks) + 7, answer, conversation)
        log.close()
        source = open_source(path, Workload())
        trace = source.trace(0)
    assert not trace.prefix and trace.unit == "tokens" and not source.generated
    names: dict[str, str] = {}
    for request, (_, chunks, _, conversation) in zip(trace.requests, prompts, strict=True):
        assert request.sizes == tuple(size for _, size in chunks)
        for key, (name, _) in zip(request.keys, chunks, strict=True):
            assert names.setdefault(name, key) == key
        if conversation is not None:
            assert names.setdefault(conversation, request.conversation or "") == request.conversation
    assert len(set(names.values())) == len(names), "two names, one hash"
    waits = [wait / 1000.0 for wait, *_ in prompts]
    assert times(trace) == pytest.approx([sum(waits[1 : n + 1]) for n in range(len(waits))], abs=2e-3)


def test_log_cannot_be_replayed(tmp_path: Path) -> None:
    a, b = ("a", 300), ("b", 200)
    trace = logged(tmp_path / "log.jsonl", (0, [a, b]), (1, [b]), (2, [b, a]), (3, [("c", 50), a]))
    outcome = replay(trace, make_policy("lru"), 500)
    assert outcome.asked.tolist() == [500, 200, 500, 350]
    assert outcome.found.tolist() == [0, 200, 500, 300], "each chunk is found by itself, whatever its place"


def test_chunk_that_stands_twice_in_a_prompt_counts_twice(tmp_path: Path) -> None:
    trace = logged(tmp_path / "log.jsonl", (0, [("a", 10), ("b", 20), ("a", 10), ("none", 0)]))
    assert trace.requests[0].sizes == (10, 20)


def test_prompt_without_known_chunks_is_logged(tmp_path: Path) -> None:
    log = TraceLog(tmp_path / "log.jsonl")
    log.note([], 10, 10)
    log.close()
    assert log.counts.noted == 0 and not (tmp_path / "log.jsonl").exists()


def test_prompts_are_in_the_order_of_their_answers(tmp_path: Path) -> None:
    log = TraceLog(tmp_path / "log.jsonl", clock=lambda: 1000.0)
    for name, age in (("second", 2.0), ("third", 1.0), ("first", 9.0)):
        log.note([(name, 10)], 10, 1, age_s=age)
    log.close()
    trace = read_mooncake(log.path)
    first, second, third = trace.requests
    assert times(trace) == [0.0, 7.0, 8.0]
    assert json.loads(log.path.read_bytes().splitlines()[2])["hash_ids"] == [int(first.keys[0])]
    assert second.keys != third.keys


def test_whether_a_conversation_went_on_is_not_known(tmp_path: Path) -> None:
    log = TraceLog(tmp_path / "log.jsonl")
    for conversation in ("x", "y", "x"):
        log.note(ONE, 200, 1, conversation)
    log.close()
    requests = read_mooncake(log.path).requests
    assert [request.continues for request in requests] == [True, False, False]
    assert requests[0].conversation == requests[2].conversation != requests[1].conversation


# -- clocks --------------------------------------------------------------------------------------------------


def test_clock_that_runs_backwards_loses_order_or_gaps(tmp_path: Path) -> None:
    trace = logged(tmp_path / "log.jsonl", *((at, ONE) for at in (100, 110, 20, 25, float("nan"), 30, 31)))
    assert times(trace) == [0, 10, 10, 15, 15, 15, 16]


def test_clock_that_was_set_back_between_two_runs_mixes_them(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    logged(path, (1000, ONE), (1010, ONE))
    trace = logged(path, (500, ONE), (507, ONE))
    assert times(trace) == [0, 10, 10, 17]


@given(st.lists(st.floats(), min_size=1, max_size=20))
def test_any_clock_gives_a_trace_that_cannot_be_read(clock: list[float]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = logged(Path(folder) / "log.jsonl", *((at, ONE) for at in clock))
    assert times(trace) == sorted(times(trace)) and len(trace.requests) == len(clock)


# -- what is in the files, and how much ----------------------------------------------------------------------


def test_names_of_chunks_and_conversations_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "log.jsonl"
    logged(path, (0, ONE), conversation="conversation-of-ada")
    content = b"".join(file.read_bytes() for file in path.parent.iterdir())
    assert b"chunk" not in content.replace(b"chunks", b"") and b"ada" not in content
    other = tmp_path / "others" / "log.jsonl"
    logged(other, (0, ONE), conversation="conversation-of-ada")
    assert read_mooncake(path).requests != read_mooncake(other).requests, "another store has another key"
    assert path.parent.stat().st_mode & 0o077 == 0
    for file in (*path.parent.iterdir(), *other.parent.iterdir()):
        assert file.stat().st_mode & 0o077 == 0, file


def test_log_grows_for_ever_or_forgets_the_latest(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for number in range(60):
        trace = logged(path, (number * 10.0, [(str(number), 10)]), limit=1000)
        assert sum(file.stat().st_size for file in parts(path)) <= 2000
    assert len(parts(path)) == 2 and path.stat().st_mode & 0o077 == 0
    assert 7 < len(trace.requests) < 20
    ends = times(trace)
    assert all(later - one == pytest.approx(10) for one, later in pairwise(ends))
    assert len(open_source(path, Workload()).trace(0).requests) == len(trace.requests)


def test_stores_share_a_log(tmp_path: Path) -> None:
    first, second = trace_path(tmp_path, tmp_path / "a"), trace_path(tmp_path, tmp_path / "b")
    assert first != second and trace_path(tmp_path, tmp_path / "b" / ".." / "a") == first


def test_next_run_knows_chunks_by_other_hashes(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    logged(path, (0, ONE))
    trace = logged(path, (1, ONE))
    assert trace.requests[0].keys == trace.requests[1].keys


# -- what may go wrong ---------------------------------------------------------------------------------------


def broken(path: Path) -> TraceLog:
    log = TraceLog(path)
    log.note(ONE, 200, 1)
    log.close()
    return log


def test_folder_that_cannot_be_made_is_an_error_of_a_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    log = broken(tmp_path / "file" / "log.jsonl")
    assert (log.counts.noted, log.counts.written, log.counts.failed) == (1, 0, 1)
    assert "log.jsonl" in log.counts.reason and "incomplete" in caplog.text


_SMALL_DISK = """
import json, resource, sys
from pathlib import Path
from blendrag.forecast.trace_log import TraceLog
path = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (700, resource.RLIM_INFINITY))
counts = []
for number in range(10):
    log = TraceLog(path)
    log.note([(f"{number}", 100)], 200, 1)
    log.close()
    counts.append((log.counts.written, log.counts.failed))
print(json.dumps(counts))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log = TraceLog(path)
log.note([("last", 100)], 200, 1)
log.close()
"""


def test_full_disk_is_an_error_of_a_request_or_leaves_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", _SMALL_DISK, str(path)], capture_output=True, text=True, check=True
    )
    counts = json.loads(done.stdout)
    written = counts.count([1, 0])
    assert 0 < written < 10 and counts.count([0, 1]) == 10 - written
    assert len(read_mooncake(path).requests) == written + 1, "what came when there was room again"


_WRITES = """
import sys, time
from pathlib import Path
from blendrag.forecast import trace_log
trace_log._INTERVAL_S = 0.001
log = trace_log.TraceLog(Path(sys.argv[1]), limit=60_000)
for number in range(300):
    log.note([(f"{sys.argv[2]} {number}", 100)], 500, 20)
    time.sleep(0.001)
log.close()
assert log.counts.written == 300, log.counts
"""


def test_two_servers_of_one_engine_lose_each_others_lines(tmp_path: Path) -> None:
    """When the file is full, too: one of them makes room."""
    path = tmp_path / "log.jsonl"
    servers = [subprocess.Popen([sys.executable, "-c", _WRITES, str(path), name]) for name in "ab"]
    assert [server.wait(60) for server in servers] == [0, 0]
    assert len(parts(path)) == 2
    assert len({request.keys for request in read_mooncake(*parts(path)).requests}) == 600


def test_line_that_a_killed_program_left_spoils_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    logged(path, (0, ONE), (10, ONE))
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    assert len(read_mooncake(path).requests) == 1, "it is being written"
    assert len(logged(path, (20, ONE)).requests) == 2
    path.write_bytes(whole[:50] + b"\n" + whole)
    with pytest.raises(SourceError, match=r"line 1"):
        read_mooncake(path)
    path.write_bytes(b"\xff{[")
    assert len(logged(path, (30, ONE)).requests) == 1


def test_disk_that_stands_still_holds_requests_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, waits = threading.Event(), threading.Event()

    def slow(log: TraceLog, data: bytes) -> None:
        waits.set()
        assert opened.wait(60)

    monkeypatch.setattr("blendrag.forecast.trace_log._INTERVAL_S", 0.0)
    monkeypatch.setattr(TraceLog, "_append", slow)
    log = TraceLog(tmp_path / "log.jsonl", capacity=3)
    log.note(ONE, 200, 1)
    assert waits.wait(60)
    for _ in range(10):
        log.note(ONE, 200, 1)
    assert (log.counts.noted, log.counts.dropped) == (11, 7)
    opened.set()
    log.close()
    assert log.counts.written == 4


def test_log_is_not_written_before_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blendrag.forecast.trace_log._INTERVAL_S", 0.01)
    log = TraceLog(tmp_path / "log.jsonl")
    log.note(ONE, 200, 1)
    until = time.monotonic() + 60
    while not log.counts.written and time.monotonic() < until:
        time.sleep(0.005)
    assert len(read_mooncake(log.path).requests) == 1
    log.close()
