"""blendrag's part of vLLM's server: routes that blend, in place of its own, and their state."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel

from blendrag.chat.tools import forced_schema
from blendrag.engine.client.running import RunningEngine
from blendrag.engine.compat.requests import end_answers
from blendrag.engine.wire.recipe import SECRET
from blendrag.errors import BlendragError, ConfigError
from blendrag.progress import SILENT
from blendrag.server import Limits, knowledge
from blendrag.server.blending import Blending
from blendrag.server.command import SERVED, tenants
from blendrag.server.completions import blended, body_of, explained
from blendrag.server.doors import DOORS
from blendrag.server.gate import Gate, Requests
from blendrag.server.keys import Keys, read_keys
from blendrag.server.page import routes as page
from blendrag.serving.library import Library
from blendrag.serving.prefill import PrefillReport
from blendrag.serving.repeats import forget
from blendrag.settings import Settings

_log = logging.getLogger(__name__)

_LOOK_S = 0.1
_CLOSING_S = 3.0
_CHILDREN_S = 3.0  # seconds from the end of a server to that of its engine's processes
_DEAD_S = 5.0  # seconds for what is left when those processes have ended before
_EXPLAIN = "/v1/kb/explain"


def attach_router(app: FastAPI) -> None:
    """Put in blendrag's routes. Raises ConfigError if the server was not started for blending, or its model
    gives no answers."""
    served = _served()
    limits, bodies = Limits(**served["limits"]), list[type[BaseModel]]()
    routes = (route for route in app.routes if isinstance(route, APIRoute) and "POST" in route.methods)
    posting = {route.path: route for route in routes}
    stocks = [posting[door.path] for door in DOORS if door.path in posting]
    if not stocks:
        raise ConfigError(
            "vLLM gives no answers from this model, so there is nothing to blend: use vllm serve"
        )
    for stock in stocks:
        bodies.append(body_of(stock.endpoint, limits))
        app.router.routes.remove(stock)
        app.add_api_route(
            stock.path,
            blended(stock.endpoint, bodies[-1]),
            methods=["POST"],
            dependencies=stock.dependencies,
            responses=stock.responses,
        )
    app.include_router(knowledge.router)
    app.include_router(page.router)
    app.add_api_route(
        _EXPLAIN,
        explained(*bodies),
        methods=["POST"],
        tags=["blendrag"],
        dependencies=[Depends(knowledge.known_parameters)],
    )
    app.state.requests = Requests()
    if served["tool_parser"]:
        from blendrag.engine.compat.forced_calls import hold_forced_calls

        hold_forced_calls(served["tool_parser"], forced_schema)
    app.add_middleware(Gate, keys=_keys(served), limits=limits, requests=app.state.requests)


async def init_state(engine_client: Any, state: Any, args: Namespace) -> None:
    """Set up blendrag's state. Raises BlendragError for an unusable folder: no port is opened then."""
    served, alone = _served(), (args.api_server_count or 1) == 1
    settings, limits = Settings.load(**served["settings"]), Limits(**served["limits"])
    engine = _Engine(settings, engine_client, asyncio.get_running_loop(), alone=alone)
    engine.facts = await engine.bound()
    if args.data_parallel_size > 1:  # no tree: each engine would keep nodes of its own requests
        engine.facts = replace(engine.facts, blocks="")
    name, *_ = args.served_model_name or [args.model]
    state.blendrag = {}
    engine.end_in_order(state.blendrag, state.requests, state)
    folder = None if served["folder"] is None else Path(served["folder"]).expanduser().resolve()
    for namespace, (settings, kept_in) in tenants(served["settings"], folder, _keys(served)).items():
        library = await asyncio.to_thread(_open, settings, kept_in, engine, limits)
        blending = Blending(library, settings, engine, name, os.environ[SECRET], served["tool_parser"])
        blending.ingest(partial(_prefill_pending, library))
        state.blendrag[namespace] = blending


class _Engine(RunningEngine):
    """vLLM's own ``AsyncLLM`` in the loop of its HTTP server, which ends it."""

    def __init__(self, settings: Settings, llm: Any, loop: asyncio.AbstractEventLoop, *, alone: bool) -> None:
        super().__init__(settings, alone=alone)
        self._llm, self._loop = llm, loop
        self._thread = threading.get_ident()

    def end_in_order(self, tenants: Mapping[str, Blending], requests: Requests, state: Any) -> None:
        """Have the server end in order, when it is to: let in no request, stop ingest behind what is being
        prefilled, and let running answers end; those that go on after half of the time
        (``--shutdown-timeout``) end with what there is of them. Then take no more calls, or whoever waits for
        one would hold it up. tenants: closed before the engine. state: of the app."""
        llm, close = self._llm, self._llm.shutdown

        def shutdown(timeout: float | None = None) -> None:
            if self._closed:  # vLLM does it twice
                return close(timeout=timeout)
            allowed, begun, dead = timeout or 0.0, time.monotonic(), llm.errored
            exit_after(_DEAD_S if dead else max(allowed - _CHILDREN_S, _DEAD_S))
            if server := getattr(state, "server", None):  # else it waits for clients that do not read
                server.config.timeout_graceful_shutdown = 1
            requests.ending = True
            for tenant in tenants.values():
                tenant.end()
            if not dead and threading.get_ident() != self._thread:
                self._let_end(requests, begun + allowed / 2, begun + 3 / 5 * allowed)
            self._end_calls()
            # Apart: in the loop's own thread, as after an error, what waits for the loop would never end.
            closing = Thread(target=_close, args=([*tenants.values()],), daemon=True)
            closing.start()
            closing.join(_CLOSING_S)
            close(timeout=max(0.0, begun + allowed - time.monotonic()))

        llm.shutdown = shutdown

    def _let_end(self, requests: Requests, until: float, at_last: float) -> None:
        """Wait for requests, by ``time.monotonic``; and then, for those that were broken off."""

        def wait(deadline: float) -> None:
            while requests.under_way and time.monotonic() < deadline:
                time.sleep(_LOOK_S)

        wait(until)
        if requests.under_way:
            self._submit(end_answers(self._llm))
            wait(at_last)


def exit_after(seconds: float) -> None:
    """End this process after ``seconds``, whatever its threads still wait for."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _close(tenants: Iterable[Blending]) -> None:
    for tenant in tenants:
        tenant.close()


def _served() -> dict[str, Any]:
    """Return what the command says. Raises ConfigError for a server that another one has started."""
    if not {SERVED, SECRET} <= os.environ.keys():
        raise ConfigError("this server was not started for blending: `blendrag serve --print` shows how")
    return json.loads(os.environ[SERVED])


def _keys(served: dict[str, Any]) -> Keys | None:
    return None if served["keys"] is None else read_keys(Path(served["keys"]))


def _open(settings: Settings, folder: Path, engine: _Engine, limits: Limits) -> Library:
    room = round(limits.repeats_gib * 2**30)
    library = Library(folder, settings, lambda *_: engine, shared=True, repeats_bytes=room)
    if library.repeats is None:
        forget(library.texts)  # an earlier server had room for them
    library.start()
    return library


def _prefill_pending(library: Library) -> None:
    """Prefill what an earlier server, or another program, left undone, as far as that goes."""
    try:
        library.texts.prefill(PrefillReport(), SILENT)
    except BlendragError as error:
        _log.warning("KV that is missing could not be prefilled: %s", error)
