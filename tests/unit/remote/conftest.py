"""A server whose answers are written down, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blendrag import RemoteChat
from blendrag.remote import chat as remote
from scripted_server import Script, scripted


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    monkeypatch.setattr(remote, "_BETWEEN_ATTEMPTS_S", 0.01)
    monkeypatch.delenv("BLENDRAG__API_KEY", raising=False)
    with scripted() as script:
        yield script


@pytest.fixture
def chat(server: Script) -> Iterator[RemoteChat]:
    made = RemoteChat(server.url)
    yield made
    made.close()
