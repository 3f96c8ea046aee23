"""Plugins that vLLM loads by its entry points, which a server names in ``VLLM_PLUGINS``.

vLLM goes on without a plugin that cannot be imported or made, and a server would go on without its keys. So
nothing is imported here that can fail; what fails later stops the start.
"""

from __future__ import annotations

import multiprocessing
import os
from argparse import Namespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI


class BlendPlugin:
    """The plugin of ``vllm.endpoint_plugins``: see
    ``vllm.plugins.endpoint_plugins.interface.EndpointPlugin``."""

    name = "blendrag"
    required_tasks = None  # whatever the server can do, it is not skipped

    def attach_router(self, app: FastAPI) -> None:
        from blendrag.server.front_end import attach_router

        attach_router(app)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        from blendrag.server.front_end import init_state

        await init_state(engine_client, state, args)


def end_with_server() -> None:
    """Have the processes that a server has started end with it, and take no embeddings of images from its
    clients; any other goes on. A plugin of ``vllm.general_plugins``, which every process of vLLM's loads
    before anything that takes long."""
    from blendrag.engine.client.watchdog import exit_with_parent
    from blendrag.engine.wire.recipe import SECRET

    if SECRET not in os.environ:
        return
    if multiprocessing.parent_process() is not None:
        exit_with_parent(of_server=True)
    from blendrag.engine.compat.start import no_embeddings_from_clients

    no_embeddings_from_clients()
