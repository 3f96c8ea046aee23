"""A server's plugins, and its end. No engine is started here."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import threading
import tomllib
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.datastructures import State
from vllm.plugins import load_endpoint_plugins

from blendrag.engine.client import watchdog
from blendrag.engine.wire.recipe import SECRET
from blendrag.errors import ConfigError, EngineClosedError
from blendrag.server import front_end
from blendrag.server.command import SERVED
from blendrag.server.front_end import _Engine
from blendrag.server.gate import Requests
from blendrag.server.plugin import BlendPlugin, end_with_server
from blendrag.settings import Settings
from places import ROOT


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The environment of a server."""
    served = {"settings": {}, "folder": str(tmp_path), "keys": None, "limits": {}}
    for name, value in (("VLLM_PLUGINS", "blendrag"), (SECRET, "secret"), (SERVED, json.dumps(served))):
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("tasks", [("embed",), ("render",), None], ids=str)
def test_server_that_gives_no_answers_does_not_start_without_keys(tasks: Any) -> None:
    """vLLM skips plugins whose tasks are not the server's, and starts."""
    (plugin,) = load_endpoint_plugins(tasks)
    with pytest.raises(ConfigError, match="no answers"):
        plugin.attach_router(FastAPI())


@pytest.mark.usefixtures("named")
def test_broken_import_does_not_start_a_server_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM logs plugins that cannot be imported, and starts."""
    for name in ("plugin", "front_end"):
        monkeypatch.delitem(sys.modules, f"blendrag.server.{name}")
    monkeypatch.setitem(sys.modules, "blendrag.server.gate", None)
    (plugin,) = load_endpoint_plugins(("generate",))
    with pytest.raises(ImportError):
        plugin.attach_router(FastAPI())


def test_plugins_that_are_named_are_there() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    found = {group: EntryPoint("blendrag", one["blendrag"], group).load() for group, one in groups.items()}
    assert found == {"vllm.endpoint_plugins": BlendPlugin, "vllm.general_plugins": end_with_server}


@pytest.mark.parametrize(
    ("secret", "parent", "watched"), [("s", "server", True), ("s", None, False), (None, "program", False)]
)
def test_program_ends_with_another_only_if_it_is_a_server(
    monkeypatch: pytest.MonkeyPatch, secret: str | None, parent: str | None, watched: bool
) -> None:
    """Every process of any vLLM loads it; a server's front end has no parent that it should end with."""
    begun: list[bool] = []
    monkeypatch.setattr(watchdog, "exit_with_parent", lambda *, of_server: begun.append(of_server))
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    monkeypatch.delenv(SECRET, raising=False)
    if secret:
        monkeypatch.setenv(SECRET, secret)
    end_with_server()
    assert begun == [True] * watched


def ended(close: Any) -> list[str]:
    """What is done, in its order, when a server with this tenant is told to end."""
    done: list[str] = []
    llm: Any = SimpleNamespace(shutdown=lambda timeout: done.append("engine"), errored=False)
    engine = _Engine(Settings.load(), llm, asyncio.new_event_loop(), alone=True)
    tenant: Any = SimpleNamespace(
        end=lambda: done.append("ingest"), close=lambda: (close(), done.append("tenant"))
    )
    requests, state = Requests(), State({"server": SimpleNamespace(config=SimpleNamespace())})
    engine.end_in_order({"": tenant}, requests, state)
    llm.shutdown(timeout=20)
    assert requests.ending and state.server.config.timeout_graceful_shutdown
    return done


@pytest.fixture(autouse=True)
def goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_end, "exit_after", lambda seconds: None)  # it would end the tests


def test_engine_ends_after_what_waits_for_it() -> None:
    assert ended(lambda: None) == ["ingest", "tenant", "engine"]


def test_running_answers_end_before_the_engine_and_are_broken_off_in_the_end() -> None:
    """One that goes on by itself, and one that goes on until it is aborted."""
    done, requests = list[str](), Requests()
    requests.under_way = 2
    threading.Timer(0.2, lambda: setattr(requests, "under_way", 1)).start()

    async def abort(ids: list[str], *, internal: bool) -> None:
        done.extend(ids)
        requests.under_way = 0

    answers = SimpleNamespace(request_states={"an answer": None})
    llm: Any = SimpleNamespace(
        shutdown=lambda timeout: done.append("engine"), errored=False, abort=abort, output_processor=answers
    )

    async def serve() -> None:
        engine = _Engine(Settings.load(), llm, asyncio.get_running_loop(), alone=True)
        engine.end_in_order({}, requests, State())
        await asyncio.to_thread(llm.shutdown, timeout=1.5)

    asyncio.run(serve())
    assert done == ["an answer", "engine"]


def test_call_that_waits_for_a_server_that_ends_hears_of_it() -> None:
    llm: Any = SimpleNamespace(shutdown=lambda timeout: None, errored=False)

    async def serve() -> None:
        engine = _Engine(Settings.load(), llm, asyncio.get_running_loop(), alone=True)
        engine.end_in_order({}, Requests(), State())
        llm.collective_rpc, llm.engine_core = lambda *_, **__: asyncio.sleep(60), None
        waiting = asyncio.create_task(asyncio.to_thread(engine.call, "flush", "store"))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(llm.shutdown, timeout=1.0)
        with pytest.raises(EngineClosedError):
            await asyncio.wait_for(waiting, 30)

    asyncio.run(serve())


def test_tenant_that_does_not_close_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_end, "_CLOSING_S", 0.01)
    go = threading.Event()
    try:
        assert ended(lambda: go.wait(50)) == ["ingest", "engine"]
    finally:
        go.set()
