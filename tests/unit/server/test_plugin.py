"""The end of a server. No engine is started here."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from blendrag.server import plugin
from blendrag.server.plugin import _Engine
from blendrag.settings import Settings
from engine_facts import FACTS


def ended(close: Any) -> list[str]:
    """What is done, in its order, when a server with this tenant is told to end."""
    done: list[str] = []
    llm: Any = SimpleNamespace(shutdown=lambda timeout: done.append("engine"), output_processor=None)
    engine = _Engine(Settings.load(), llm, asyncio.new_event_loop(), FACTS, alone=True)
    tenant: Any = SimpleNamespace(close=lambda: (close(), done.append("tenant")))
    engine.end_in_order({"": tenant})
    llm.shutdown(timeout=20)
    return done


def test_engine_ends_before_what_waits_for_it() -> None:
    assert ended(lambda: None) == ["tenant", "engine"]


def test_tenant_that_does_not_close_holds_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_CLOSING_S", 0.01)
    go = threading.Event()
    try:
        assert ended(lambda: go.wait(50)) == ["engine"]
    finally:
        go.set()
