"""A catalogue of many chunks: what every question asks of it stays fast, and none of it stays in memory.

A hundred thousand of them; a million, which the project promises, with ``make nightly``. What was measured is
printed (``pytest -s``). Open and lookup have the bounds of the promise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from blendrag.serving.owners import owner_of
from blendrag.store.catalogue import Catalogue
from forked import Forked
from stores import IDENTITY

SIZES = [100_000, pytest.param(1_000_000, marks=pytest.mark.nightly(part="large"))]
IDS = np.arange(8, dtype="<i4").tobytes()


def key(number: int) -> str:
    """Spread like hashes, and each computed from its number."""
    return f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}{number:016x}"


@pytest.fixture(scope="module", params=SIZES)
def chunks(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def root(chunks: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalogue of ready chunks, filled in one transaction; every tenth has been used."""
    root, owners = tmp_path_factory.mktemp("many"), chunks // 20
    catalogue = Catalogue.open(root, IDENTITY)
    catalogue._db.execute("PRAGMA cache_size = -500000")
    with catalogue._transaction() as db:
        db.executemany(
            "INSERT INTO records VALUES (?, 'ready', 1000, 8, ?, ?)",
            sorted((key(n), n * 7919 % chunks, int(n % 10 == 0)) for n in range(chunks)),
        )
        db.executemany(
            "INSERT INTO chunks (number, key, text, token_ids) VALUES (?, ?, ?, ?)",
            ((n, key(n), f"text of chunk {n:07}", IDS) for n in range(chunks)),
        )
        db.executemany(
            "INSERT INTO owners VALUES (?, ?)",
            (
                (f"/documents/{n:06}" if n % 2 else owner_of(f"of-{n % 4}", f"{n:06}"), key(m))
                for n in range(owners)
                for m in range(n, chunks, owners)
            ),
        )
    catalogue.close()
    return root


@pytest.fixture
def many(root: Path) -> Catalogue:
    return Catalogue.open(root, IDENTITY)


def took(action: Callable[[], object], times: int = 1) -> float:
    """Median seconds."""
    spent = []
    for _ in range(times):
        begin = time.perf_counter()
        action()
        spent.append(time.perf_counter() - begin)
    print(f"{median(spent) * 1e3:.3f} ms", end=" ")
    return median(spent)


def test_opening_many_chunks_reads_none_of_them(root: Path) -> None:
    assert took(lambda: Catalogue.open(root, IDENTITY).close(), 5) < 2


def test_lookup_among_many_takes_no_longer_than_a_millisecond(many: Catalogue, chunks: int) -> None:
    wanted = iter([[key(n * 12345 % chunks + m) for m in range(12)] for n in range(400)])
    assert took(lambda: many.ready(next(wanted)), 200) < 0.001
    assert took(lambda: many.entries_of(next(wanted)), 200) < 0.001


def test_lookups_among_many_keep_none_of_them_in_memory(root: Path, chunks: int) -> None:
    """What the process grows by, apart from Python and the imports, at its peak."""
    opened, looked_up, listed = map(int, Forked(MEMORY, root, chunks).finished(300).split())
    print(f"opened {opened} MiB, looked up {looked_up} MiB, recent() {listed} MiB", end=" ")
    assert opened <= looked_up < 16
    assert listed < 16 + chunks / 2500  # keys as Python strings


MEMORY = """
import sys
from pathlib import Path
from stores import IDENTITY
from blendrag.store.catalogue import Catalogue
def peak():
    status = Path("/proc/self/status").read_text()  # ru_maxrss begins with the parent's
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024
before = peak()
catalogue = Catalogue.open(Path(sys.argv[1]), IDENTITY)
print(round(peak() - before))
chunks = int(sys.argv[2])
for n in range(0, chunks, 1000):
    keys = [f"{m * 0x9E3779B97F4A7C15 % 2**64:016x}{m:016x}" for m in range(n, n + 12)]
    assert len(catalogue.entries_of(keys)) == 12
catalogue.totals()
print(round(peak() - before))
catalogue.recent()
print(round(peak() - before))
"""


def test_change_to_one_document_does_not_read_the_others(many: Catalogue, chunks: int) -> None:
    """By what reading every row takes here, whatever this machine is like."""
    every = took(many.recent, 3)
    texts = [(key(chunks + n), "text", range(8)) for n in range(20)]
    assert took(lambda: many.register("volatile:new", texts)) < every / 3
    assert took(lambda: many.owners("volatile:"), 3) < every / 100
    assert took(lambda: many.pending_keys(), 3) < every / 100
    assert took(lambda: many.mark_ready(key(chunks), 1000)) < every / 3
    assert took(lambda: many.release("volatile:new")) < every / 3
    assert took(lambda: many.doomed(), 3) < every / 100
    many.buried(many.doomed())


def test_page_of_collections_reads_none_of_their_texts(many: Catalogue, chunks: int) -> None:
    assert took(lambda: many.collections("", "", 100), 20) < 0.001
    page, total = many.collections("", "", 100)
    assert (list(page), total) == (["of-0", "of-2"], 2)
    assert sum(of.ready for of in page.values()) == chunks // 2


def test_figures_over_many_are_no_reason_to_wait(many: Catalogue) -> None:
    assert took(many.totals, 3) < 2
    assert took(lambda: many.reuse(10)) < 30
