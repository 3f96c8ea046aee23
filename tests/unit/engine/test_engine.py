"""The engine's handle, over a worker that is stood in for. No engine is started here."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.launch import SERVING, WorkerExtension
from blendrag.engine.client.running import RunningEngine
from blendrag.engine.client.stores import StoreClient
from blendrag.engine.prefixes.trees import TreeClient
from blendrag.errors import EngineBusyError, EngineClosedError, EngineError, StoreFullError
from blendrag.settings import Settings
from blendrag.store.identity import KVIdentity
from places import ROOT

LAB = WorkerExtension("some.Worker", ("some:Processor",))
SETTINGS = Settings.load()
PROGRAM = os.environ | {"PYTHONPATH": str(ROOT)}


class Answering(RunningEngine):
    """Workers that give these answers, one after the other: one, or those of data parallel engines."""

    def __init__(self, *engines: list[Any], delay: float = 0.0) -> None:
        super().__init__(SETTINGS)
        self._engines, self._delay = engines, delay
        core = SimpleNamespace(core_engines=engines, call_utility_all_async=self._of_all)
        self._llm = SimpleNamespace(collective_rpc=self._of_one, engine_core=core, errored=False)

    async def _of_one(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        await asyncio.sleep(self._delay)
        return [self._engines[0].pop(0)]

    async def _of_all(self, utility: str, method: str, *about: Any) -> list[list[Any]]:
        return [[answers.pop(0) if answers else {"ok": None}] for answers in self._engines]

    def flush(self) -> Any:
        return asyncio.run(self.acall("flush", "store"))


def call(answer: Any, delay: float = 0.0) -> Any:
    """What an operation gives that the worker answers so."""
    return Answering([answer], delay=delay).flush()


def test_error_of_the_worker_has_its_class_here() -> None:
    assert call({"ok": 7}) == 7
    with pytest.raises(StoreFullError, match="no room"):
        call({"error": ["StoreFullError", "no room"]})


def test_answer_of_another_engine_than_the_first_arrives() -> None:
    more = {"more": None}
    assert Answering([{"ok": None}], [{"ok": 7}]).flush() == 7
    assert Answering([more, {"ok": 1}], [{"ok": 7}]).flush() == 1
    assert Answering([{"ok": 1}], [more, more, {"ok": 7}]).flush() == 1
    with pytest.raises(StoreFullError, match="no room"):
        Answering([more, {"ok": 1}], [more, {"error": ["StoreFullError", "no room"]}]).flush()


def test_worker_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blendrag.engine.client.running._CALL_TIMEOUT_S", 0.5)
    with pytest.raises(EngineError, match=r"flush within 0\.5 s"):
        call({"ok": 7}, delay=60.0)


class Process(RunningEngine):
    """An engine that is a process which answers nothing, and its client's loop."""

    def __init__(self) -> None:
        super().__init__(SETTINGS)
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self._llm = self
        self.engine_core = self.output_processor = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    @property
    def errored(self) -> bool:
        return self.process.poll() is not None

    async def collective_rpc(self, *_: Any, **__: Any) -> Any:
        await asyncio.get_running_loop().create_future()

    reset_prefix_cache = collective_rpc  # type: ignore[assignment]


WAITS = {
    "a call": lambda engine: engine.call("ingest", "store", []),
    "several calls": lambda engine: engine.calls_later(("check", "store"), ("flush", "store")).result(),
    "a store that is opened": lambda engine: StoreClient.open(
        engine, Path("kv"), KVIdentity("m", "w", "float32", 1, 1, 4), ()
    ),
    "a store": lambda engine: StoreClient(engine, "store").close(),
    "a prefetch": lambda engine: StoreClient(engine, "store").prefetch(["key"]).result(),
    "a tree": lambda engine: TreeClient(engine, "tree").stats(),
    "a start": lambda engine: engine._submit(engine.bound()).result(),
    "the prefix cache": lambda engine: RunningEngine.reset_prefix_cache(engine),
}


WORKER = """
import multiprocessing, sys, time
from types import SimpleNamespace

def work():
    from blendrag.engine.client.engine import Engine
    from blendrag.engine.client.launch import spawning
    from blendrag.settings import Settings

    async def start(self):
        with spawning():
            core = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
            core.start()
        self._llm = SimpleNamespace(shutdown=lambda timeout: core.kill())

    Engine._start = start
    Engine(Settings.load(model=sys.argv[1], dtype="float32"))

if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=work, daemon=True)
    worker.start()
    worker.join()
    print(worker.exitcode)
"""


def test_worker_of_a_pool_may_have_an_engine_and_ends_it_by_itself(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "program.py").write_text(WORKER)
    command = [sys.executable, "program.py", str(model_dir)]
    ended = subprocess.run(command, cwd=tmp_path, env=PROGRAM, capture_output=True, text=True, timeout=300)
    assert (ended.stdout, ended.stderr) == ("0\n", "")


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_wait_ends_with_the_engine(wait: Callable[[Any], Any]) -> None:
    engine = Process()
    threading.Timer(0.3, engine.process.kill).start()
    begun = time.monotonic()
    with pytest.raises(EngineError, match="died"):
        wait(engine)
    assert time.monotonic() - begun < 60  # a tenth of the timeout


def test_wait_ends_when_the_engine_is_closed() -> None:
    engine = Process()
    threading.Timer(0.3, engine._end_calls).start()
    with pytest.raises(EngineClosedError):
        engine.call("ingest", "store", [])
    engine.process.kill()


@pytest.fixture
def running(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An engine with this extension."""
    engine = SimpleNamespace(settings=SETTINGS, extension=request.param, alive=True, _users=1)
    monkeypatch.setattr(Engine, "_shared", engine)
    yield engine


@pytest.mark.parametrize("running", [LAB], indirect=True)
def test_engine_of_the_laboratory_serves(running: Any) -> None:
    assert Engine.shared(SETTINGS) is Engine.shared(SETTINGS, None, LAB) is running
    assert running._users == 3


@pytest.mark.parametrize("running", [SERVING], indirect=True)
def test_engine_without_its_extension_is_not_taken_for_the_laboratorys(running: Any) -> None:
    assert Engine.shared(SETTINGS) is running
    with pytest.raises(EngineBusyError, match=r"without some\.Worker: close it first"):
        Engine.shared(SETTINGS, None, LAB)
    assert running._users == 2
