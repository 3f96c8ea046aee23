"""A store's own traffic, kept on this machine for replays and for ``lpc+``; only for those who ask for it.

A JSON line per prompt, with the names of Mooncake's traces: when it came (``timestamp``, milliseconds),
tokens of prompt and answer, its chunks in their order (``hash_ids``) and the tokens of each (``sizes``). They
are ``independent``: each is found without those before it. Chunks and conversations are hashed with a key
that is in a file of its own; a log that is given away without it does not say what was read. Texts are not
kept.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from queue import Empty, Full, Queue

import xxhash

from blendrag.private import make_file, make_folder, write_whole
from blendrag.store.lock import Turns

LIMIT = 16_000_000  # bytes of each of the two files: about 70,000 prompts of six chunks
CAPACITY = 4096  # prompts that wait to be written
_INTERVAL_S = 5.0
_FOR_EVER_S = 1e11  # no clock is so far from any other
_HASH_BYTES = 6  # all JSON readers keep whole numbers of this size
_KEY_BYTES = 32

_log = logging.getLogger(__name__)


def trace_path(folder: Path, store: Path) -> Path:
    """Where the traffic of the store in the folder ``store`` is logged, among the logs in ``folder``."""
    return folder / f"trace-{xxhash.xxh3_64_hexdigest(str(store.resolve()).encode())}.jsonl"


def parts(path: Path) -> list[Path]:
    """The files of a log, the older first. Those of a trace that is no log: itself."""
    return [older, path] if (older := _older(path)).is_file() else [path]


def _older(path: Path) -> Path:
    return path.parent / f"{path.name}.1"


@dataclass(frozen=True, slots=True)
class TraceCounts:
    """Prompts since the start. dropped: too many waited. failed: could not be written, the last time for
    ``reason``."""

    noted: int = 0
    written: int = 0
    dropped: int = 0
    failed: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Prompt:
    at: float
    sizes: dict[str, int]
    length: int
    answer: int
    conversation: str | None


class TraceLog:
    """Of one store, by the processes that have it open: several only if they are a server's. It writes in a
    thread of its own, every few seconds.

    limit: bytes of a file; a full one takes the place of the older one. clock: seconds. Where it is set back,
    time stands still for one prompt and goes on from there; from one run of the program to the next as well.
    """

    def __init__(
        self,
        path: Path,
        *,
        limit: int = LIMIT,
        capacity: int = CAPACITY,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self._limit, self._clock = limit, clock
        self._read = clock()
        self._now = self._read if abs(self._read) < _FOR_EVER_S else 0.0
        self._shift = 0.0
        self._key = b""
        self._turns = Turns(path.with_suffix(".lock"))
        self._queue: Queue[_Prompt | None] = Queue(capacity)
        self._counts, self._lock = TraceCounts(), threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="blendrag-trace", daemon=True)
        self._thread.start()

    def note(
        self,
        chunks: Sequence[tuple[str, int]],
        length: int,
        answer: int,
        conversation: str | None = None,
        age_s: float = 0.0,
    ) -> None:
        """Log a prompt that had known chunks in it; one without any is not logged. Returns at once.

        chunks: keys and tokens, in the prompt's order; repeats count once. length, answer: tokens of the
        prompt and of its answer. age_s: seconds since the prompt came.
        """
        sizes: dict[str, int] = {}
        for key, size in chunks:
            if size > 0:
                sizes.setdefault(key, size)
        if not sizes:
            return
        prompt = _Prompt(self._time() - age_s, sizes, length, answer, conversation)
        try:
            self._queue.put_nowait(prompt)
        except Full:
            self._count(noted=1, dropped=1)
        else:
            self._count(noted=1)

    @property
    def counts(self) -> TraceCounts:
        with self._lock:
            return self._counts

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits, and stop."""
        self._closing.set()
        with suppress(Full):
            self._queue.put_nowait(None)
        self._thread.join(timeout_s)

    def _time(self) -> float:
        """Seconds; never less than the time before."""
        with self._lock:
            now = self._clock()
            passed = now - self._read
            self._now += passed if 0.0 < passed < _FOR_EVER_S else 0.0
            self._read = now
            return self._now

    def _run(self) -> None:
        closing = False
        while not closing:
            batch = [self._queue.get()]
            closing = self._closing.wait(_INTERVAL_S)
            with suppress(Empty):
                while True:
                    batch.append(self._queue.get_nowait())
            self._write([prompt for prompt in batch if prompt])

    def _write(self, prompts: list[_Prompt]) -> None:
        if not prompts:
            return
        try:
            make_folder(self.path.parent)
            with self._turns.mine():
                if not self._key:
                    self._begin(prompts[0].at)
                self._append("".join(map(self._line, prompts)).encode())
        except OSError as error:
            reason = f"cannot write to {str(self.path)!r}: {error.strerror}"
            if reason != self.counts.reason:
                _log.warning("the log of prompts is incomplete: %s", reason)
            self._count(failed=len(prompts), reason=reason)
        else:
            self._count(written=len(prompts))

    def _line(self, prompt: _Prompt) -> str:
        record = {
            "timestamp": max(0, round(1000.0 * (prompt.at + self._shift))),
            "input_length": max(prompt.length, sum(prompt.sizes.values())),
            "output_length": prompt.answer,
            "hash_ids": [self._hidden(key) for key in prompt.sizes],
            "sizes": list(prompt.sizes.values()),
            "independent": True,
        }
        if prompt.conversation is not None:
            record["conversation"] = self._hidden(prompt.conversation)
        return json.dumps(record, separators=(",", ":")) + "\n"

    def _hidden(self, name: str) -> int:
        data = name.encode(errors="surrogatepass")
        return int.from_bytes(blake2b(data, key=self._key, digest_size=_HASH_BYTES).digest())

    def _begin(self, at: float) -> None:
        """Go on where the program stopped the last time, were it in the middle of a line."""
        make_file(self.path)
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self.path, whole)
        self._shift = max(0.0, _last_time(data[:whole]) - at)
        self._key = _key(self.path.with_suffix(".key"))

    def _append(self, data: bytes) -> None:
        """All of it or nothing."""
        make_file(self.path)
        size = self.path.stat().st_size
        if size and size + len(data) > self._limit:
            os.replace(self.path, _older(self.path))
            make_file(self.path)
            size = 0
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, size)
            raise
        finally:
            os.close(file)

    def _count(self, reason: str | None = None, **more: int) -> None:
        with self._lock:
            now = {name: getattr(self._counts, name) + value for name, value in more.items()}
            self._counts = replace(self._counts, **now, reason=reason or self._counts.reason)


def _last_time(lines: bytes) -> float:
    """Seconds; of the last line, 0 where there is none that can be read."""
    try:
        return float(json.loads(lines[lines.rfind(b"\n", 0, -1) + 1 :])["timestamp"]) / 1000.0
    except (ValueError, KeyError, TypeError):
        return 0.0


def _key(path: Path) -> bytes:
    """The key of the hashes, made if there is none. Raises OSError."""
    with suppress(FileNotFoundError):
        if len(key := path.read_bytes()) == _KEY_BYTES:
            return key
    key = os.urandom(_KEY_BYTES)
    write_whole(path, key)
    return key
