"""Writers that are killed at random moments, and what is checked after each of them.

Run as a program (``python killed.py root rounds limit seed``): importing PyTorch takes seconds, so one
process imports it and forks the writers. It prints what happened as JSON, and fails if a check does.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

import torch

from blendrag.store.catalogue import Catalogue
from blendrag.store.maintenance.closed_index import closed_index
from blendrag.store.maintenance.verify import Verifier
from stores import IDENTITY, Chunk, get, make_chunk, open_store, problems, put, same, size, states

CHUNKS = [make_chunk(seed, tokens) for seed, tokens in enumerate([4, 60, 300, 900] * 6)]
LIMIT = sum(size(chunk) for chunk in CHUNKS) // 3


class Steps(Protocol):
    """What a writer does until it is killed."""

    def step(self) -> None: ...


Make = Callable[[random.Random], Steps]


class Writer:
    """Puts, reads and deletes chunks until it is killed. What it begins and what is done it notes in
    ``root/log``, where a line outlives it."""

    def __init__(self, root: Path, limit: int | None, choice: random.Random) -> None:
        self._store = open_store(root, ram=LIMIT // 3, disk=limit)
        self._catalogue = Catalogue.open(root, IDENTITY)  # the client's
        self._log = os.open(root / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._choice = choice

    def step(self) -> None:
        number = self._choice.randrange(len(CHUNKS))
        action = self._choice.choice([self._ingest] * 5 + [self._put_again, self._delete, self._read])
        action(number, CHUNKS[number])

    def _note(self, what: str, number: int) -> None:
        os.write(self._log, f"{what} {number}\n".encode())

    def _ingest(self, number: int, chunk: Chunk) -> None:
        self._note("wanted", number)
        self._catalogue.register(f"doc {number}", [(chunk.key, "text", chunk.token_ids)])
        if put(self._store, chunk):
            self._note("put", number)

    def _put_again(self, number: int, chunk: Chunk) -> None:
        """Also what was evicted, and what nobody wants."""
        if put(self._store, chunk):
            self._note("put", number)

    def _delete(self, number: int, chunk: Chunk) -> None:
        self._note("unwanted", number)
        self._store.delete(self._catalogue.release(f"doc {number}"))
        self._note("deleted", number)

    def _read(self, _: int, chunk: Chunk) -> None:
        get(self._store, chunk)


def write_until_killed(make: Make, choice: random.Random, steps: int) -> NoReturn:
    try:
        writer = make(choice)
        while True:
            os.write(steps, b"!")
            writer.step()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def kill_one(make: Make, seed: int) -> None:
    """Most of them in their first steps, some maybe while they still open what the last one left."""
    choice = random.Random(seed)
    seen, steps = os.pipe()
    process = os.fork()
    if process == 0:
        write_until_killed(make, choice, steps)
    os.close(steps)
    for _ in range(choice.randrange(6)):
        os.read(seen, 1)
    time.sleep(choice.uniform(0, 0.01))
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    os.close(seen)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, "it ended by itself"


def check(root: Path, limit: int | None, counts: Counter[str]) -> None:
    """Raises AssertionError if opening does not find everything that was acknowledged, and nothing else."""
    lines = (root / "log").read_text().split("\n")[:-1] if (root / "log").exists() else []
    last = {int(line.split()[1]): line.split()[0] for line in lines}
    counts["half-written"] += len(list((root / "kv").glob("tmp/*")))
    before = problems(root) if (root / "catalogue.sqlite").exists() else []
    counts["left to be cleaned up"] += len(before)
    store = open_store(root, disk=limit)
    assert problems(root) == []
    found = states(root)
    for number, chunk in enumerate(CHUNKS):
        state = found.get(chunk.key)
        if last.get(number) == "put":
            assert state == "ready" or (limit and state == "evicted"), f"chunk {number} is {state}"
        elif last.get(number) == "deleted":
            assert state is None, f"chunk {number} was deleted and is {state}"
        assert same(get(store, chunk), chunk) == (state == "ready"), f"chunk {number} is {state}"
        counts[str(state)] += 1
    used = store.stats()["disk"]["bytes"]
    assert limit is None or used <= limit
    counts["acknowledged"] = len([line for line in lines if line.startswith("put")])
    counts["deleted"] = len([line for line in lines if line.startswith("deleted")])
    store.close()
    with closed_index(root) as index:
        report = Verifier(index).run()
    assert (report.problems, report.quarantined, report.doomed) == ([], 0, 0)


def main(
    writer: Callable[[Path, int | None, random.Random], Steps],
    check: Callable[[Path, int | None, Counter[str]], None],
    limited: int,
) -> None:
    """Do as the program's arguments say. limited: bytes of the disk tier where they ask for a limit."""
    root, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
    limit = limited if sys.argv[3] == "limited" else None
    torch.set_num_threads(1)
    root.mkdir()
    counts: Counter[str] = Counter()
    for number in range(rounds):
        kill_one(lambda choice: writer(root, limit, choice), seed + number)
        check(root, limit, counts)
    print(json.dumps(counts))


if __name__ == "__main__":
    main(Writer, check, LIMIT)
