"""Tenants of a server that has no engine, and what its renderer would do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fastapi import FastAPI
from vllm.entrypoints.openai.chat_completion.api_router import create_chat_completion
from vllm.entrypoints.openai.completion.api_router import create_completion
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from blendrag.server import LIMITS, Limits
from blendrag.server.blending import Blending
from blendrag.server.completions import body_of
from blendrag.server.gate import Gate, Requests
from blendrag.server.keys import Key, Keys
from blendrag.serving.collection import Collection
from blendrag.serving.library import Library
from blendrag.serving.session import EngineSession
from blendrag.settings import Settings
from engine_facts import FACTS

TEXT = "The warranty of the battery lasts for eight years or 160,000 kilometres. " * 4
CHAT, COMPLETION = body_of(create_chat_completion), body_of(create_completion)
Tenants = dict[str, Blending]


class Renderer:
    """What vLLM's makes of a request."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def render_chat(self, request: Any, **_: Any) -> Any:
        ids = self._tokenizer.apply_chat_template(
            request.messages, add_generation_prompt=True, return_dict=False
        )
        return None, [{"prompt_token_ids": ids}]

    async def render_completion(self, request: Any, **_: Any) -> Any:
        return [{"prompt_token_ids": self._tokenizer(request.prompt).input_ids}]


def tenants_without_engine(tmp_path: Path, model_dir: Path) -> Iterator[Tenants]:
    """Two, of whom the first has a document. A fixture."""
    engine: Any = SimpleNamespace(blends=True, facts=FACTS, max_model_len=512)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineSession, "store", None)
        patch.setattr(EngineSession, "open", lambda *_: Mock(id="opened"))
        patch.setattr(EngineSession, "start", lambda *_: engine)
        made: Tenants = {}
        for name in ("", "globex"):
            settings = Settings.load(max_model_len=512, model=str(model_dir), namespace=name)
            library = Library(tmp_path / f"kv-{name}", settings, shared=True)
            library.start()
            made[name] = Blending(library, settings, engine, "model", "seal")
        keep(made[""], "cities", power=TEXT)
        yield made
        for each in made.values():
            each.library.close()


def app_of(tenants: Tenants, keys: Keys | None = None, limits: Limits = LIMITS) -> FastAPI:
    """A server's app without routes yet."""
    app = FastAPI()
    init_exception_handler(app)
    app.state.args = SimpleNamespace(log_error_stack=False)
    app.state.blendrag = tenants
    app.state.online_renderer = Renderer(tenants[""].library.tokenizer)
    app.add_middleware(Gate, keys=keys, limits=limits, requests=Requests())
    return app


def keys_of(keys: Mapping[str, Key]) -> Keys:
    """What a file of keys says: keys by their secrets."""
    return Keys({hashlib.sha256(secret.encode()).digest(): key for secret, key in keys.items()})


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def keep(blending: Blending, collection: str, **texts: str) -> None:
    """As a PUT does, without their KV."""
    owned = Collection(blending.library, collection)._owned({id: [text] for id, text in texts.items()}, None)
    blending.library.texts.register(*owned)
