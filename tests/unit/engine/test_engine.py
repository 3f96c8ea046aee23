"""The engine's handle, over a worker that is stood in for. No engine is started here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.launch import SERVING, WorkerExtension, engine_key
from blendrag.errors import EngineBusyError, EngineError, StoreFullError
from blendrag.settings import Settings

LAB = WorkerExtension("some.Worker", ("some:Processor",))
SETTINGS = Settings.load()


def call(answer: Any, delay: float = 0.0) -> Any:
    """What an operation gives that the worker answers so."""

    async def collective_rpc(method: str, args: tuple[Any, ...]) -> list[Any]:
        await asyncio.sleep(delay)
        return [answer]

    llm = SimpleNamespace(collective_rpc=collective_rpc)
    engine: Any = SimpleNamespace(_llm=llm, settings=SETTINGS.model_copy(update={"call_timeout_s": 0.5}))
    return asyncio.run(Engine.acall(engine, "flush", "store"))


def test_error_of_the_worker_has_another_class_here() -> None:
    assert call({"ok": 7}) == 7
    with pytest.raises(StoreFullError, match="no room"):
        call({"error": ["StoreFullError", "no room"]})


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
