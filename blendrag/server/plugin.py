"""What vLLM loads by the entry point ``vllm.endpoint_plugins``: routes that blend, in place of its own."""

from __future__ import annotations

import asyncio
import contextlib
from argparse import Namespace
from pathlib import Path
from typing import Any, ClassVar

from fastapi import FastAPI
from fastapi.routing import APIRoute

from blendrag.errors import BlendragError, ConfigError
from blendrag.progress import SILENT
from blendrag.server import knowledge
from blendrag.server.blending import Blending
from blendrag.server.completions import blended
from blendrag.server.engine import ServedEngine
from blendrag.serving.lease import default_kv_dir
from blendrag.serving.library import Library
from blendrag.serving.prefill import PrefillReport
from blendrag.settings import Settings

_BLENDED = ("/v1/chat/completions", "/v1/completions")


class BlendPlugin:
    """See ``vllm.plugins.endpoint_plugins.interface.EndpointPlugin``. Named in ``VLLM_PLUGINS``."""

    name = "blendrag"
    required_tasks: ClassVar[tuple[str, ...]] = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        for path in _BLENDED:
            for stock in _posting(app, path):
                app.router.routes.remove(stock)
                app.add_api_route(
                    path,
                    blended(stock.endpoint),
                    methods=["POST"],
                    dependencies=stock.dependencies,
                    responses=stock.responses,
                )
        app.include_router(knowledge.router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Raises BlendragError if the folder cannot be used, or the server was not started for blending:
        the port is not opened then."""
        served = _served(engine_client, args)
        settings = Settings.load(**served["settings"])
        engine = await ServedEngine.of(settings, engine_client)
        library = await asyncio.to_thread(_open, settings, served["folder"], engine)
        state.blendrag = Blending(library, settings, engine, served["seal"])
        state.blendrag.finish = asyncio.create_task(asyncio.to_thread(_prefill_pending, library))


def _posting(app: FastAPI, path: str) -> list[APIRoute]:
    routes = [route for route in app.routes if isinstance(route, APIRoute) and route.path == path]
    return [route for route in routes if "POST" in route.methods]


def _served(engine_client: Any, args: Namespace) -> dict[str, Any]:
    transfer = engine_client.vllm_config.kv_transfer_config
    served = transfer and transfer.kv_connector_extra_config.get("served")
    if not served:
        raise ConfigError("this server was not started for blending: `blendrag serve --print` shows how")
    if (args.api_server_count or 1) > 1:
        raise ConfigError("several API servers cannot share a folder yet: --api-server-count 1")
    return {**served, "seal": transfer.engine_id}


def _open(settings: Settings, folder: str | None, engine: ServedEngine) -> Library:
    root = Path(folder) if folder else default_kv_dir(settings)
    library = Library(root.expanduser().resolve(), settings, lambda *_: engine)
    library.start()
    return library


def _prefill_pending(library: Library) -> None:
    """What an earlier server, or another program, left undone. What fails is tried again by the next."""
    with contextlib.suppress(BlendragError):
        library.prefill(PrefillReport(), SILENT)
