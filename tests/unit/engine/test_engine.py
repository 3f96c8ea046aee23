"""The engine's handle, over a worker that is stood in for. No engine is started here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.launch import SERVING, WorkerExtension, engine_key
from blendrag.engine.client.running import RunningEngine
from blendrag.errors import EngineBusyError, EngineError, StoreFullError
from blendrag.settings import Settings

LAB = WorkerExtension("some.Worker", ("some:Processor",))
SETTINGS = Settings.load()


class Answering(RunningEngine):
    """Workers that give these answers, one after the other: one, or those of data parallel engines."""

    def __init__(self, *engines: list[Any], delay: float = 0.0) -> None:
        super().__init__(SETTINGS.model_copy(update={"call_timeout_s": 0.5}))
        self._engines, self._delay = engines, delay
        core = SimpleNamespace(core_engines=engines, call_utility_all_async=self._of_all)
        self._llm = SimpleNamespace(collective_rpc=self._of_one, engine_core=core)

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


def test_error_of_the_worker_has_another_class_here() -> None:
    assert call({"ok": 7}) == 7
    with pytest.raises(StoreFullError, match="no room"):
        call({"error": ["StoreFullError", "no room"]})


def test_answer_of_another_engine_than_the_first_is_lost() -> None:
    more = {"more": None}
    assert Answering([{"ok": None}], [{"ok": 7}]).flush() == 7
    assert Answering([more, {"ok": 1}], [{"ok": 7}]).flush() == 1
    assert Answering([{"ok": 1}], [more, more, {"ok": 7}]).flush() == 1
    with pytest.raises(StoreFullError, match="no room"):
        Answering([more, {"ok": 1}], [more, {"error": ["StoreFullError", "no room"]}]).flush()


def test_worker_that_hangs_is_waited_for() -> None:
    with pytest.raises(EngineError, match=r"flush within 0\.5 s.*call_timeout_s"):
        call({"ok": 7}, delay=60.0)


@pytest.fixture
def running(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An engine with this extension."""
    engine = SimpleNamespace(settings=SETTINGS, extension=request.param, alive=True, _users=1)
    monkeypatch.setattr(Engine, "_shared", {engine_key(SETTINGS): engine})
    yield engine


@pytest.mark.parametrize("running", [LAB], indirect=True)
def test_engine_of_the_laboratory_does_not_serve(running: Any) -> None:
    assert Engine.shared(SETTINGS) is Engine.shared(SETTINGS, None, LAB) is running
    assert running._users == 3


@pytest.mark.parametrize("running", [SERVING], indirect=True)
def test_engine_without_its_extension_is_taken_for_the_laboratorys(running: Any) -> None:
    assert Engine.shared(SETTINGS) is running
    with pytest.raises(EngineBusyError, match=r"without some\.Worker: close it first"):
        Engine.shared(SETTINGS, None, LAB)
    assert running._users == 2
