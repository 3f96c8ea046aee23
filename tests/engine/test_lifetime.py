"""Engine processes end with the process that started them, and do not run its script again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from blendrag.engine.client.engine import Engine
from blendrag.errors import EngineStartError
from blendrag.settings import Settings
from places import ROOT
from served import START_S, Server
from waiting import until

pytestmark = pytest.mark.own_engine

# On purpose without `if __name__ == "__main__"`: questions asked at the top of a script, as in a notebook.
SCRIPT = """
import sys, time
print("begun", flush=True)
from blendrag.engine.client.generation import Sampling
from blendrag.engine.client.engine import Engine
from blendrag.settings import Settings
engine = Engine.shared(Settings.load(max_model_len=256, kv_cache_gib=1, dtype="float32"))
print("tokens", len(engine.generate([1, 2, 3], Sampling(max_tokens=4)).token_ids), flush=True)
if sys.argv[1] == "wait":
    time.sleep(600)
"""


@contextlib.contextmanager
def running(tmp_path: Path, argument: str, code: str = SCRIPT) -> Iterator[subprocess.Popen[str]]:
    script = tmp_path / "script.py"
    script.write_text(code)
    process = subprocess.Popen(
        [sys.executable, str(script), argument],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "stderr").open("w"),
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def lines_until(process: subprocess.Popen[str], prefix: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if line.startswith(prefix):
            break
    return lines


@pytest.mark.parametrize("stage", [pytest.param("loading", marks=pytest.mark.nightly), "serving"])
def test_killing_the_parent_leaves_no_engine_process(tmp_path: Path, model_dir: Path, stage: str) -> None:
    with running(tmp_path, "wait") as waiting:
        parent = psutil.Process(waiting.pid)
        if stage == "serving":
            assert lines_until(waiting, "tokens") == ["begun", "tokens 4"]  # once: children skip the script
        else:
            until(lambda: len(spawned(parent)) == 2, START_S)
        children = parent.children(recursive=True)
    until(lambda: not [child for child in children if alive(child)], START_S)


def spawned(parent: psutil.Process) -> list[psutil.Process]:
    """Engine processes below ``parent``: the core, then its worker."""
    found = []
    for process in parent.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ended already
            if {"spawn_main", "VLLM"} & set(re.findall(r"\w+", " ".join(process.cmdline()))):
                found.append(process)
    return found


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# A plugin by which a model loads for as long as a large one does.
LOADING = """
import time
def load_slowly():
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    def load_model(*_, **__):
        print("it is loading", flush=True)
        time.sleep(300)
    BaseModelLoader.load_model = load_model
"""


@pytest.mark.nightly
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_server_ended_while_it_loads_ends_and_leaves_no_process(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    about = tmp_path / "loading-1.dist-info"
    about.mkdir()
    (tmp_path / "loading.py").write_text(LOADING)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: loading\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nloading = loading:load_slowly\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("VLLM_PLUGINS", "loading")
    server = Server(tmp_path / "kv")
    until(lambda: "it is loading" in server.log.read_text() or server.process.poll() is not None, START_S)
    left = server.end(how)
    for process in left:
        process.kill()
    assert left == []


IMPATIENT = """
import os, signal, sys
import blendrag.engine.compat.required  # the rest of a start is what processes do
from blendrag.engine.client.engine import Engine
from blendrag.errors import EngineStartError
from blendrag.settings import Settings
if interrupted := sys.argv[1] == "interrupted":
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # as Ctrl-C
    signal.alarm(4)
os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = "600" if interrupted else "4"
try:
    Engine.shared(Settings.load(max_model_len=256, kv_cache_gib=1, dtype="float32"))
except (EngineStartError, KeyboardInterrupt) as error:
    print("it ended:", repr(error), flush=True)
input()
"""


@pytest.mark.parametrize(
    ("why", "told"), [("late", "VLLM_ENGINE_READY_TIMEOUT_S"), ("interrupted", "KeyboardInterrupt")]
)
def test_start_that_is_given_up_leaves_no_process(
    tmp_path: Path, model_dir: Path, why: str, told: str
) -> None:
    with running(tmp_path, why, IMPATIENT) as process:
        (said,) = lines_until(process, "it ended")
        assert told in said
        until(lambda: not spawned(psutil.Process(process.pid)), START_S)
        process.communicate("\n")
        assert process.returncode == 0, "threads of the start hold up the end"


@pytest.mark.nightly
def test_a_script_that_just_ends_takes_the_engine_with_it(tmp_path: Path, model_dir: Path) -> None:
    with running(tmp_path, "end") as process:
        lines = lines_until(process, "tokens")
        children = psutil.Process(process.pid).children(recursive=True)
        assert process.stdout is not None
        lines += process.stdout.read().splitlines()
        assert process.wait() == 0
    assert lines == ["begun", "tokens 4"]
    assert (tmp_path / "stderr").read_text() == ""
    until(lambda: not [child for child in children if alive(child)], START_S)


KILLED = """
import sys, threading, time
from pathlib import Path
import psutil
from blendrag.errors import EngineError
from blendrag.serving.collection import Collection
from blendrag.serving.library import Library
from blendrag.settings import Settings

texts = {str(n): [f"The village of Delta{n} has {n} houses. " * 40] for n in range(40)}
settings = Settings.load(max_model_len=1024, kv_cache_gib=1, dtype="float32")
library = Library(Path("kv"), settings)
kept = Collection(library, "villages")

def stored():
    return library.catalogue.totals().ready

def kill():
    while stored() < 2:
        time.sleep(0.1)
    for process in psutil.Process().children(recursive=True):
        if sys.argv[1] in process.name():
            process.kill()
    print("killed", flush=True)

library.start()
threading.Thread(target=kill).start()
try:
    kept.add(texts)
except EngineError as error:
    print("it ended:", error, flush=True)
before = stored()
if sys.argv[1] == "Worker":
    kept.add(texts)
    print("it goes on:", 2 <= before < stored() == len(texts), flush=True)
library.close()
print("closed", flush=True)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("which", ["Worker", "EngineCore"])
def test_ingest_hears_of_an_engine_that_is_killed_and_goes_on_with_the_next(
    tmp_path: Path, model_dir: Path, which: str
) -> None:
    with running(tmp_path, which, KILLED) as process:
        lines_until(process, "killed")
        begun = time.monotonic()
        lines = lines_until(process, "it ended")
        assert time.monotonic() - begun < 60  # seconds, and the machine may be busy; not the timeout of calls
        assert "the engine died at ingest" in lines[-1]
        log = re.search(r"\S+engine\.log", lines[-1])
        assert log is not None and Path(log.group()).is_file()
        lines = lines_until(process, "closed")
        assert lines == [*["it goes on: True"] * (which == "Worker"), "closed"]
        process.wait(60)
        assert process.returncode == 0
        assert (tmp_path / "stderr").read_text() == ""


@pytest.mark.nightly
def test_start_that_fails_for_want_of_memory_names_the_size(tmp_path: Path, model_dir: Path) -> None:
    long = shutil.copytree(model_dir, tmp_path / "long")
    config = json.loads((long / "config.json").read_text())
    (long / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 18}))
    settings = Settings.load(model=str(long), dtype="float32", kv_cache_gib=1)
    with pytest.raises(
        EngineStartError, match=r"does not fit: .* 262,144 tokens 3\.8 GiB.*lower max_model_len"
    ):
        Engine.shared(settings)
    until(lambda: not spawned(psutil.Process()), START_S)
