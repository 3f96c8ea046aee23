"""The embedded engine: one vLLM ``AsyncLLM`` per configuration and process, owned by one background loop."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import tempfile
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from importlib.util import find_spec
from multiprocessing import resource_tracker
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, ClassVar

from blendrag.engine.client.engine_log import log_there, open_log
from blendrag.engine.client.launch import (
    READY,
    SERVING,
    WorkerExtension,
    busy,
    connector_args,
    engine_args,
    engine_environment,
    engine_key,
    spawning,
)
from blendrag.engine.client.requirement import check_vllm, require_vllm
from blendrag.engine.client.running import RunningEngine, T
from blendrag.engine.client.shortage import shortage
from blendrag.engine.wire.operations import EngineFacts
from blendrag.engine.wire.start_error import kept, one_line
from blendrag.errors import BlendragError, EngineBusyError, EngineClosedError, EngineError, EngineStartError
from blendrag.machine import warn_of_emulation, warn_of_idle_gpu
from blendrag.models import Tell, import_rich, quantisation, resolve_model
from blendrag.settings import Settings

# vLLM kills what has not ended by then, which leaves shared memory behind. An idle machine needs 5 seconds.
_SHUTDOWN_TIMEOUT_S = 30.0

_START_TIMEOUT_S = 900.0  # unless vLLM's variable says another


class Engine(RunningEngine):
    """A :class:`RunningEngine` that this process has started. Get one with :meth:`shared`; give it back with
    :meth:`release`."""

    _shared: ClassVar[Engine | None] = None
    _lock: ClassVar[Any] = threading.Lock()

    def __init__(
        self, settings: Settings, progress: Tell | None = None, extension: WorkerExtension = SERVING
    ) -> None:
        super().__init__(settings, extension)
        self._users = 0
        self._pid = os.getpid()
        note = progress or (lambda _: None)
        require_vllm()
        self.model_path: Path = resolve_model(
            settings.model, cache_dir=settings.cache_dir, revision=settings.revision, progress=note
        )
        self._sockets = tempfile.TemporaryDirectory(prefix="blendrag-", ignore_cleanup_errors=True)
        self.log = open_log(settings.cache_dir)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="blendrag-engine", daemon=True)
        self._thread.start()
        warn_of_idle_gpu()
        note("starting the engine")
        start, limit_s = self._submit(self._start()), float(os.environ.get(READY, _START_TIMEOUT_S))
        try:
            self.facts = start.result(limit_s)
        except BlendragError:
            self._stop_loop()
            raise
        except TimeoutError:
            self._give_up(start)
            raise EngineStartError(
                f"the engine did not start within {limit_s:g} s ({READY});"
                " VLLM_LOGGING_LEVEL=INFO shows what it waits for"
            ) from None
        except Exception as error:
            self._stop_loop()
            raise EngineStartError(
                f"the engine did not start with {settings.model}: {error}"
                f" ({self.log or 'its log'} says more; with VLLM_LOGGING_LEVEL=INFO, the terminal does)"
            ) from error
        except BaseException:  # Ctrl-C, for example: nobody would own the engine
            self._give_up(start)
            raise
        atexit.register(self.close)
        # A process of multiprocessing's waits for those that it has started, before what atexit has.
        self._at_end = Finalize(None, self.close, exitpriority=0)
        if settings.dtype == "auto":
            warn_of_emulation(self.facts.dtype)

    def _run_loop(self) -> None:
        # A terminal sends Ctrl-C to every process in the foreground. It is meant for this one, which tells
        # the engine what to stop; the engine's processes inherit the mask of the thread that starts them.
        with engine_environment(self.settings, self._sockets.name, self.log):
            resource_tracker.ensure_running()  # started later, it would lift the mask
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self._loop.run_forever()

    async def _start(self) -> EngineFacts:
        with engine_environment(self.settings, self._sockets.name, self.log):
            import_rich()
            check_vllm()
            from blendrag.engine.compat.platform import LOGGER
            from blendrag.engine.compat.start import start_llm

            args = engine_args(self.settings, self.model_path, self.extension)
            if self._closed:
                raise EngineClosedError("its start was given up")
            try:
                with spawning():
                    self._llm = start_llm(args, connector_args(self.settings))
            except Exception as error:
                if not self._closed and (short := shortage(self.model_path, args)):
                    raise EngineStartError(f"{self.settings.model} does not fit: {short}") from error
                cause = kept(self._sockets.name) or one_line(error)
                if how := quantisation(self.model_path):
                    cause += f"; its weights are quantised ({how}): in another format they may load"
                if "failed to be inspected" in cause and find_spec("torchvision") is None:
                    cause += "; vLLM imports torchvision for models that read images, too: install it"
                    cause += " (without a GPU its +cpu build, from where torch's comes)"
                raise RuntimeError(cause) from error
            finally:
                if self.log is not None:
                    log_there(LOGGER, self.log)  # vLLM has made its handlers by now
        try:
            return await self.bound()
        except BaseException:
            self._llm.shutdown(timeout=0)
            del self._llm  # as in close()
            raise

    def _give_up(self, start: Future[Any]) -> None:
        """End the processes of a start that nobody waits for; any of them may hold the device. The engine's
        core is ended here, and its watchdog ends the worker. vLLM, which waits for them in our loop's thread,
        then fails."""
        self._closed = True  # a start that has made no process yet makes none
        from blendrag.engine.compat.start import engine_processes

        deadline = time.monotonic() + _SHUTDOWN_TIMEOUT_S
        while not start.done() and time.monotonic() < deadline:
            for process in engine_processes():
                process.kill()  # while it loads a model, it does not act on a request to end
            time.sleep(0.1)
        if start.done():
            self._stop_loop()

    # -- sharing ------------------------------------------------------------------------------------------

    @classmethod
    def shared(
        cls, settings: Settings, progress: Tell | None = None, extension: WorkerExtension = SERVING
    ) -> Engine:
        """Return the engine of this configuration. Starts it if it is not running, and blocks until it has
        started.

        An engine that has another extension than serving's can serve, too. Raises EngineBusyError while an
        engine of another configuration runs, or one without the extension: there is one device.
        """
        with cls._lock:
            engine = cls._shared
            if engine is None or not engine.alive:
                engine = cls._shared = cls(settings, progress, extension)
            elif engine_key(engine.settings) != engine_key(settings):
                raise busy(engine.settings, settings)
            elif extension not in (SERVING, engine.extension):
                raise EngineBusyError(
                    f"an engine with these settings has this device, but without {extension.worker}:"
                    " close it first"
                )
            engine._users += 1
            return engine

    def release(self) -> None:
        """Give the engine back; the last user's release ends its processes."""
        with self._lock:
            self._users -= 1
            last = self._users <= 0
        if last:
            self.close()

    def close(self) -> None:
        """End the engine's processes. Safe to call twice."""
        if self._closed or self._pid != os.getpid():
            return
        atexit.unregister(self.close)
        self._at_end.cancel()
        shut_down = self._submit(self._shut_down())
        self._closed = True
        shut_down.result()
        self._stop_loop()
        del self._llm  # its finaliser fails when the interpreter is already going down

    async def _shut_down(self) -> None:
        self._llm.shutdown(timeout=_SHUTDOWN_TIMEOUT_S)

    def _stop_loop(self) -> None:
        async def cancel_all() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._sockets.cleanup()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._pid != os.getpid() and not self._closed:
            work.close()
            raise EngineError(
                f"this engine belongs to process {self._pid}, not to its fork {os.getpid()}:"
                " fork before the first use, or use the spawn start method"
            )
        return super()._submit(work)
