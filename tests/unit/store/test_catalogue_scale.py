"""A catalogue of a million chunks: what every question asks of it stays fast, and none of it stays in memory.

What was measured is printed (``pytest -s``). Open and lookup have the bounds that the project promises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from blendrag.store.catalogue import Catalogue
from stores import IDENTITY, start

CHUNKS, OWNERS = 1_000_000, 50_000
IDS = np.arange(8, dtype="<i4").tobytes()


def key(number: int) -> str:
    """Spread like hashes, and each computed from its number."""
    return f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}{number:016x}"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalogue of ready chunks, filled in one transaction; every tenth has been used."""
    root = tmp_path_factory.mktemp("million")
    catalogue = Catalogue.open(root, IDENTITY)
    catalogue._db.execute("PRAGMA cache_size = -500000")
    with catalogue._transaction() as db:
        db.executemany(
            "INSERT INTO records VALUES (?, 'ready', 1000, 8, ?, ?)",
            sorted((key(n), n * 7919 % CHUNKS, int(n % 10 == 0)) for n in range(CHUNKS)),
        )
        db.executemany(
            "INSERT INTO chunks VALUES (?, ?, ?, ?)",
            ((n, key(n), f"text of chunk {n:07}", IDS) for n in range(CHUNKS)),
        )
        db.executemany(
            "INSERT INTO owners VALUES (?, ?)",
            ((f"/documents/{n:06}", key(m)) for n in range(OWNERS) for m in range(n, CHUNKS, OWNERS)),
        )
    catalogue.close()
    return root


@pytest.fixture
def million(root: Path) -> Iterator[Catalogue]:
    catalogue = Catalogue.open(root, IDENTITY)
    yield catalogue
    catalogue.close()


def took(action: Callable[[], object], times: int = 1) -> float:
    """Median seconds."""
    spent = []
    for _ in range(times):
        begin = time.perf_counter()
        action()
        spent.append(time.perf_counter() - begin)
    print(f"{median(spent) * 1e3:.3f} ms", end=" ")
    return median(spent)


@pytest.mark.slow
def test_opening_a_million_chunks_reads_none_of_them(root: Path) -> None:
    assert took(lambda: Catalogue.open(root, IDENTITY).close(), 5) < 2


@pytest.mark.slow
def test_lookup_among_a_million_takes_no_longer_than_a_millisecond(million: Catalogue) -> None:
    wanted = iter([[key(n * 12345 % CHUNKS + m) for m in range(12)] for n in range(400)])
    assert took(lambda: million.ready(next(wanted)), 200) < 0.001
    assert took(lambda: million.entries_of(next(wanted)), 200) < 0.001


@pytest.mark.slow
def test_lookups_among_a_million_keep_none_of_them_in_memory(root: Path) -> None:
    """What the process grows by, apart from Python and the imports, at its peak."""
    opened, looked_up, listed = map(int, run(MEMORY, root))
    print(f"opened {opened} MiB, looked up {looked_up} MiB, recent() {listed} MiB", end=" ")
    assert opened <= looked_up < 16
    assert listed < 400  # a million keys as Python strings


MEMORY = """
import sys
from pathlib import Path
from stores import IDENTITY
from test_catalogue_scale import CHUNKS, key
from blendrag.store.catalogue import Catalogue
def peak():
    status = Path("/proc/self/status").read_text()  # ru_maxrss begins with the parent's
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024
before = peak()
catalogue = Catalogue.open(Path(sys.argv[1]), IDENTITY)
print(round(peak() - before))
for n in range(0, CHUNKS, 1000):
    catalogue.entries_of([key(n + m) for m in range(12)])
catalogue.totals()
print(round(peak() - before))
catalogue.recent()
print(round(peak() - before))
"""


def run(script: str, *arguments: object) -> list[str]:
    process = start(script, *arguments)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return output.split()


@pytest.mark.slow
def test_change_to_one_document_does_not_read_the_others(million: Catalogue) -> None:
    """A hundredth of what reading every row takes here, whatever this machine is like."""
    every = took(million.recent)
    texts = [(key(CHUNKS + n), "text", range(8)) for n in range(20)]
    assert took(lambda: million.register("volatile:new", texts)) < every / 10
    assert took(lambda: million.owners("volatile:")) < every / 100
    assert took(lambda: million.pending_keys()) < every / 100
    assert took(lambda: million.mark_ready(key(CHUNKS), 1000)) < every / 10
    assert took(lambda: million.release("volatile:new")) < every / 10
    assert took(lambda: million.doomed()) < every / 100
    million.buried(million.doomed())


@pytest.mark.slow
def test_figures_over_a_million_are_no_reason_to_wait(million: Catalogue) -> None:
    assert took(million.totals, 3) < 2
    assert took(lambda: million.reuse(10)) < 30
