"""Full disks and sudden ends, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from blendrag.errors import StoreError, StoreFullError
from blendrag.store.catalogue import Catalogue
from blendrag.store.record import Miss
from blendrag.store.tiers import DiskTier, TierSpec
from forked import Forked
from mounts import Mount
from stores import (
    LAYOUT,
    A,
    B,
    files,
    filled,
    get,
    make_chunk,
    make_record,
    open_store,
    problems,
    put,
    register,
    same,
    size,
    states,
)

LARGE = make_chunk(2, tokens=20_000)

FULL = """
import resource, sys
from pathlib import Path
from stores import *
from blendrag.errors import StoreFullError

root = Path(sys.argv[1])
store = open_store(root)
large = make_chunk(2, tokens=20_000)
put(store, A)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
try:
    put(store, large)
except StoreFullError as error:
    print(error)
print(sorted(files(root)) == [f"{A.key}.safetensors"], store.stats()["disk"]["chunks"])
print(put(store, B) == size(B), same(get(store, A), A))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(put(store, large) == size(large), same(get(store, large), large))
store.close()
"""


def test_folder_that_another_engine_makes_at_the_same_moment_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = os.mkdir

    def second(path: Path, mode: int = 0o777) -> None:
        mkdir(path, mode)
        mkdir(path, mode)

    with monkeypatch.context() as patch:
        patch.setattr("os.mkdir", second)
        DiskTier(TierSpec(kind="disk"), LAYOUT, tmp_path / "kv").close()
    assert (tmp_path / "kv" / "tmp").is_dir()


def test_full_disk_leaves_nothing_behind_and_later_puts_work(tmp_path: Path) -> None:
    register(tmp_path, [A, LARGE, B])
    message, *rest = Forked(FULL, tmp_path).finished().splitlines()
    assert "free disk space" in message and str(tmp_path) in message
    assert rest == ["True 1", "True True", "True True"]
    assert set(states(tmp_path).values()) == {"ready"}


def test_disk_full_to_the_last_byte_never_costs_what_is_stored(tmp_path: Path, mount: Mount) -> None:
    """The catalogue lives on the same disk and finds no room either."""
    small_disk = tmp_path / "disk"
    mount(small_disk, size="1m")
    chunks = [make_chunk(seed, tokens=300) for seed in range(150)]
    register(small_disk, chunks)
    store = open_store(small_disk)
    kept = []
    for chunk in chunks:
        with suppress(StoreFullError):
            put(store, chunk)
            kept.append(chunk)
    assert 5 < len(kept) < 145
    assert files(small_disk) == {f"{chunk.key}.safetensors" for chunk in kept}
    assert all(same(get(store, chunk), chunk) for chunk in kept)
    store.delete([chunk.key for chunk in kept[:5]])
    assert put(store, chunks[-1]) == size(chunks[-1])


def test_failed_rewrite_keeps_the_record_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path, [A])
    with monkeypatch.context() as patch:
        patch.setattr("blendrag.store.tiers.disk.os.replace", no_room)
        with pytest.raises(StoreFullError):
            put(store, A)
    assert same(get(store, A), A)
    assert store.stats()["disk"]["chunks"] == 1
    assert states(tmp_path) == {A.key: "ready"}


def test_chunk_driven_out_for_a_write_that_failed_is_not_called_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(tmp_path, [A, B])
    store = open_store(tmp_path, ram=1 << 20, disk=size(A) + 100)
    put(store, A)
    monkeypatch.setattr("blendrag.store.tiers.disk.os.replace", no_room)
    with pytest.raises(StoreFullError):
        put(store, B)
    assert states(tmp_path) == {A.key: "evicted", B.key: "pending"}
    assert not files(tmp_path)
    assert get(store, A) == Miss("missing")


def test_rewrite_that_cannot_be_noted_keeps_what_was_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(tmp_path, [A, B])
    store = open_store(tmp_path)
    put(store, A)

    def full(*_: object) -> bool:
        raise StoreFullError("the catalogue failed: database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Catalogue, "mark_ready", full)
        for chunk in (A, B):
            with pytest.raises(StoreFullError):
                put(store, chunk)
    assert files(tmp_path) == {f"{A.key}.safetensors"}
    assert same(get(store, A), A) and get(store, B) == Miss("missing")
    assert states(tmp_path) == {A.key: "ready", B.key: "pending"}


def no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_other_write_errors_are_not_called_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("blendrag.store.tiers.disk.os.fsync", fail)
    disk = DiskTier(TierSpec(kind="disk"), LAYOUT, tmp_path)
    with pytest.raises(StoreError, match="Input/output error") as caught:
        disk.put(make_record(A))
    assert not isinstance(caught.value, StoreFullError)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


DYING = """
import os, signal, sys
from pathlib import Path
from stores import *
from blendrag.store.catalogue import Catalogue
from blendrag.store.tiers import DiskTier

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

root, when = Path(sys.argv[1]), sys.argv[2]
"""

KILLED = """
def cut_and_die(descriptor):
    os.ftruncate(descriptor, 300)
    die()

store = open_store(root, ram=1 << 20)
put(store, A)
if when == "half written":
    os.fsync = cut_and_die
elif when == "written, not renamed":
    os.replace = die
elif when == "renamed, not in the catalogue":
    Catalogue.mark_ready = die
put(store, make_chunk(2, tokens=50))
"""

EVICTION_KILLED = """
store = open_store(root, ram=1 << 20, disk=2 * RECORD)
put(store, A)
put(store, B)
if when == "noted, not removed":
    DiskTier._remove = die
elif when == "removed, the other not written":
    DiskTier._write = die
put(store, C)
Catalogue.mark_ready = die
put(store, A)  # which nobody has asked for since it left
"""


def killed(script: str, root: Path, when: str) -> None:
    process = Forked(DYING + script, root, when)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, errors


@pytest.mark.parametrize("when", ["half written", "written, not renamed", "renamed, not in the catalogue"])
def test_kill_in_the_middle_of_a_write_leaves_a_store_that_opens_clean(tmp_path: Path, when: str) -> None:
    cut = make_chunk(2, tokens=50)
    register(tmp_path, [A, cut])
    killed(KILLED, tmp_path, when)
    assert len(files(tmp_path)) == 2  # there is something to clean up
    store = open_store(tmp_path)
    survived = when == "renamed, not in the catalogue"
    assert states(tmp_path) == {A.key: "ready", cut.key: "ready" if survived else "pending"}
    assert len(files(tmp_path)) == 1 + survived
    assert problems(tmp_path) == []
    assert same(get(store, A), A)
    assert put(store, cut) == size(cut)
    assert same(get(store, cut), cut)


@pytest.mark.parametrize(
    "when", ["noted, not removed", "removed, the other not written", "put again, not in the catalogue"]
)
def test_kill_in_the_middle_of_an_eviction_leaves_no_orphan(tmp_path: Path, when: str) -> None:
    chunks = [make_chunk(seed) for seed in range(3)]
    register(tmp_path, chunks)
    killed(EVICTION_KILLED, tmp_path, when)
    again = when.startswith("put again")
    assert len(files(tmp_path)) == (1 if when.startswith("removed") else 2)
    assert len(problems(tmp_path)) == (0 if when.startswith("removed") else 1)  # something to clean up
    open_store(tmp_path).close()
    assert problems(tmp_path) == []
    assert list(states(tmp_path).values()) == (
        ["evicted", "evicted", "ready"] if again else ["evicted", "ready", "pending"]
    )


# -- kill -9 at random moments (see killed.py and killed_nodes.py) --------------------------------------

RUN = "import runpy; runpy.run_module('{}', run_name='__main__')"


@pytest.mark.parametrize("module", ["killed", "killed_nodes"])
@pytest.mark.parametrize("kind", ["unlimited", "limited"])
@pytest.mark.parametrize("kills", [30, pytest.param(100, marks=pytest.mark.nightly(part="large"))])
def test_no_kill_costs_what_was_acknowledged_or_leaves_anything_behind(
    tmp_path: Path, module: str, kind: str, kills: int
) -> None:
    """Of ingest, of eviction, and of nodes: nothing half-written, no orphan, no broken path, nothing missing,
    at any restart."""
    process = Forked(RUN.format(module), tmp_path / "index", kills, kind, 0)
    counts = json.loads(process.finished(300))
    print(counts)
    assert counts["deleted"] > kills / 20
    if module == "killed_nodes":
        assert counts["put"] > kills / 2
    else:
        assert counts["acknowledged"] > kills / 2  # it was killed at work
        assert counts["left to be cleaned up"] > 0
        assert (counts.get("evicted", 0) > 0) == (kind == "limited")
