"""The embedded engine: one vLLM ``AsyncLLM`` per configuration and process, owned by one background loop."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Sequence
from concurrent.futures import CancelledError, Future
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from blendrag import errors
from blendrag.engine.client.generation import (
    Delta,
    Sampling,
    delta_of,
    vllm_prompt,
    vllm_reasoning,
    vllm_sampling,
)
from blendrag.engine.client.launch import (
    SERVING,
    WorkerExtension,
    busy,
    connector_args,
    engine_args,
    engine_environment,
    engine_key,
    main_not_imported_again,
)
from blendrag.engine.client.prior_turns import PriorTurns
from blendrag.engine.client.requirement import check_vllm, require_vllm
from blendrag.engine.client.shortage import shortage
from blendrag.engine.operations import EngineFacts
from blendrag.engine.recipe import Recipe
from blendrag.engine.report import BlendReport
from blendrag.engine.start_error import kept, one_line
from blendrag.errors import (
    ConfigError,
    EngineBusyError,
    EngineClosedError,
    EngineError,
    GenerationTimeoutError,
    PromptTooLongError,
)
from blendrag.machine import warn_of_emulation, warn_of_idle_gpu
from blendrag.models import quantisation, resolve_model
from blendrag.settings import Settings

# vLLM kills what has not ended by then, which leaves shared memory behind; an idle machine needs five.
_SHUTDOWN_TIMEOUT_S = 30.0

T = TypeVar("T")
Progress = Callable[[str], None]


class Engine:
    """Get one with :meth:`shared`; give it back with :meth:`release`. Safe to use from any thread or loop."""

    _shared: ClassVar[dict[tuple[Any, ...], Engine]] = {}
    _lock: ClassVar[Any] = threading.Lock()

    def __init__(
        self, settings: Settings, progress: Progress | None = None, extension: WorkerExtension = SERVING
    ) -> None:
        self.settings, self.extension = settings, extension
        self._users = 0
        self._pid = os.getpid()
        self._ids = itertools.count()
        self._turns = PriorTurns()
        self._slicing = asyncio.Lock()
        self._closed = False
        note = progress or (lambda _: None)
        require_vllm()
        self.model_path: Path = resolve_model(
            settings.model, cache_dir=settings.cache_dir, revision=settings.revision, progress=note
        )
        self._sockets = tempfile.TemporaryDirectory(prefix="blendrag-", ignore_cleanup_errors=True)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="blendrag-engine", daemon=True)
        self._thread.start()
        warn_of_idle_gpu()
        note("starting the engine")
        start = self._submit(self._start())
        try:
            self.facts: EngineFacts = start.result(settings.start_timeout_s)
        except errors.BlendragError:
            self._stop_loop()
            raise
        except TimeoutError:
            self._give_up(start)
            raise EngineError(
                f"the engine did not start within {settings.start_timeout_s:g} s (start_timeout_s);"
                " VLLM_LOGGING_LEVEL=INFO shows what it waits for"
            ) from None
        except Exception as error:
            self._stop_loop()
            raise EngineError(
                f"the engine did not start with {settings.model}: {error}"
                " (VLLM_LOGGING_LEVEL=INFO shows vLLM's own log)"
            ) from error
        atexit.register(self.close)
        if settings.dtype == "auto":
            warn_of_emulation(self.facts.dtype)

    def _run_loop(self) -> None:
        # A terminal sends Ctrl-C to every process in the foreground. It is meant for this one, which tells
        # the engine what to stop; the engine's processes inherit the mask of the thread that starts them.
        with engine_environment(self.settings, self._sockets.name):
            resource_tracker.ensure_running()  # started later, it would lift the mask
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self._loop.run_forever()

    async def _start(self) -> EngineFacts:
        with engine_environment(self.settings, self._sockets.name):
            check_vllm()
            from blendrag.engine import compat

            args = engine_args(self.settings, self.model_path, self.extension)
            if self._closed:
                raise EngineClosedError("its start was given up")
            try:
                with main_not_imported_again():
                    self._llm = compat.start_llm(args, connector_args(self.settings))
            except Exception as error:
                if not self._closed and (short := shortage(self.model_path, args)):
                    raise EngineError(f"{self.settings.model} does not fit: {short}") from error
                cause = kept(self._sockets.name) or one_line(error)
                if how := quantisation(self.model_path):
                    cause += f"; its weights are quantised ({how}): in another format they may load"
                raise RuntimeError(cause) from error
        try:
            facts = EngineFacts(**(await self._llm.collective_rpc("blendrag_bind"))[0])
        except BaseException:
            self._llm.shutdown(timeout=0)
            raise
        return facts

    def _give_up(self, start: Future[Any]) -> None:
        """End the processes of a start that takes too long, any of which may hold the device: the engine's
        core here, and by its watchdog the worker. vLLM, which waits for them in our loop's thread, then
        fails."""
        self._closed = True  # a start that has come to no process yet makes none
        from blendrag.engine import compat

        deadline = time.monotonic() + _SHUTDOWN_TIMEOUT_S
        while not start.done() and time.monotonic() < deadline:
            for process in compat.engine_processes():
                process.kill()  # while it loads a model, it only takes note of a request to end
            time.sleep(0.1)
        if start.done():
            self._stop_loop()

    # -- sharing ------------------------------------------------------------------------------------------

    @classmethod
    def shared(
        cls, settings: Settings, progress: Progress | None = None, extension: WorkerExtension = SERVING
    ) -> Engine:
        """The engine of this configuration, started if it is not running. Blocks for its start.

        One with another extension than serving's serves as well. Raises EngineBusyError while an engine of
        another configuration runs, or one without the extension: there is one device.
        """
        key = engine_key(settings)
        with cls._lock:
            running = {at: engine for at, engine in cls._shared.items() if engine.alive}
            cls._shared = dict(running)
            engine = running.pop(key, None)
            if running:
                (other,) = running.values()
                raise busy(other.settings, settings)
            if engine is None:
                engine = cls._shared[key] = cls(settings, progress, extension)
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

    # -- what it knows ------------------------------------------------------------------------------------

    @property
    def blends(self) -> bool:
        """Whether this model can be blended; ``facts.reason`` says why not."""
        return not self.facts.reason

    @property
    def alive(self) -> bool:
        """Whether it can still be used."""
        return not self._closed and not self._llm.errored

    @property
    def max_model_len(self) -> int:
        return int(self._llm.model_config.max_model_len)

    # -- calls --------------------------------------------------------------------------------------------

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed or self._pid != os.getpid():
            work.close()
            if self._closed:
                raise EngineClosedError("this engine was closed: open a new one")
            raise EngineError(
                f"this engine belongs to process {self._pid}, not to its fork {os.getpid()}:"
                " fork before the first use, or use the spawn start method"
            )
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, operation: str, *args: Any) -> Any:
        """Run one of the worker's operations on plain data, and wait for it (see :class:`StoreClient`)."""
        return self._submit(self._call(operation, *args)).result()

    def call_later(self, operation: str, *args: Any) -> Future[Any]:
        """``call`` without waiting."""
        return self._submit(self._call(operation, *args))

    def calls_later(self, *calls: Sequence[Any]) -> Future[None]:
        """Several, (operation, arguments...) each, one after the other."""
        return self._submit(self._calls(calls))

    async def _calls(self, calls: Sequence[Sequence[Any]]) -> None:
        for operation, *args in calls:
            await self._call(operation, *args)

    async def _call(self, operation: str, *args: Any) -> Any:
        limit = self.settings.call_timeout_s

        async def ask(method: str, *about: Any) -> dict[str, Any]:
            answer: dict[str, Any] = (await self._llm.collective_rpc(method, args=about))[0]
            return answer

        try:
            async with asyncio.timeout(limit):
                answer = await ask("blendrag_call", operation, *args)
            if "more" in answer:
                # One at a time: the engine takes a step only when nobody's call is waiting.
                async with self._slicing, asyncio.timeout(limit):
                    while "more" in answer:
                        answer = await ask("blendrag_go_on", answer["more"])
        except TimeoutError:
            raise EngineError(
                f"the engine did not end {operation} within {limit:g} s: allow more (call_timeout_s), or give"
                " it less at once (ingest_batch_tokens)"
            ) from None
        except Exception as error:
            raise EngineError(f"the engine failed at {operation}: {error}") from error
        if "error" in answer:
            name, message = answer["error"]
            raise getattr(errors, name, EngineError)(message)
        return answer["ok"]

    def reset_prefix_cache(self) -> bool:
        """Forget all exact and blended prefixes; False, and nothing done, while a request holds any KV."""
        return self._submit(self._llm.reset_prefix_cache()).result()

    # -- generation ---------------------------------------------------------------------------------------

    # namespace: the tenant, whose prompts the prefix cache keeps apart from others', blended or not.

    def generate(
        self, token_ids: Sequence[int], sampling: Sampling, recipe: Recipe | None = None, namespace: str = ""
    ) -> Delta:
        """The whole completion as one piece."""
        try:
            return self._submit(self._whole(token_ids, sampling, recipe, namespace)).result()
        except CancelledError:
            raise _closed_meanwhile() from None

    async def agenerate(
        self, token_ids: Sequence[int], sampling: Sampling, recipe: Recipe | None = None, namespace: str = ""
    ) -> Delta:
        """``generate`` for any event loop. Cancelling it stops the generation."""
        return await asyncio.wrap_future(self._submit(self._whole(token_ids, sampling, recipe, namespace)))

    def stream(
        self, token_ids: Sequence[int], sampling: Sampling, recipe: Recipe | None = None, namespace: str = ""
    ) -> Generator[Delta]:
        """Pieces as they come. Closing the iterator stops the generation."""
        pieces: queue.Queue[Delta | BaseException | None] = queue.Queue()
        task = self._submit(self._feed(pieces.put, token_ids, sampling, recipe, namespace))
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            task.cancel()

    async def astream(
        self, token_ids: Sequence[int], sampling: Sampling, recipe: Recipe | None = None, namespace: str = ""
    ) -> AsyncGenerator[Delta]:
        """``stream`` for any event loop."""
        pieces: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(piece: Delta | BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody reads any more
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        task = self._submit(self._feed(put, token_ids, sampling, recipe, namespace))
        try:
            while (piece := await pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            task.cancel()

    async def _feed(
        self,
        put: Callable[[Delta | BaseException | None], Any],
        token_ids: Sequence[int],
        sampling: Sampling,
        recipe: Recipe | None,
        namespace: str,
    ) -> None:
        try:
            async for delta in self._deltas(token_ids, sampling, recipe, namespace):
                put(delta)
            put(None)
        except asyncio.CancelledError:  # by the reader, who is gone; or by close()
            put(_closed_meanwhile())
            raise
        except Exception as error:
            put(error)

    async def _whole(
        self, token_ids: Sequence[int], sampling: Sampling, recipe: Recipe | None, namespace: str
    ) -> Delta:
        whole: Delta | None = None
        async for delta in self._deltas(token_ids, sampling, recipe, namespace):
            whole = delta if whole is None else whole.joined(delta)
        if whole is None:
            raise EngineError("the engine ended a request without an answer")
        return whole

    async def _deltas(
        self, token_ids: Sequence[int], sampling: Sampling, recipe: Recipe | None, namespace: str
    ) -> AsyncIterator[Delta]:
        from blendrag.engine import compat

        if sampling.forced and not self.extension.logits_processors:
            raise ConfigError("forced tokens are for an engine of the laboratory (blendrag.lab.running)")
        room = self.max_model_len - len(token_ids)
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {len(token_ids)} tokens, the model's window {self.max_model_len}:"
                " ask for fewer documents (top_k) or use a model with a longer window"
            )
        ticket = f"blendrag-{next(self._ids)}"
        prompt = vllm_prompt(list(token_ids), recipe, self._turns, namespace)
        params = vllm_sampling(sampling, room, recipe, ticket)
        begin, ttft, prefix = time.perf_counter(), 0.0, 0
        try:
            async with asyncio.timeout(sampling.timeout_s):
                async for output in self._llm.generate(prompt, params, ticket, **vllm_reasoning(sampling)):
                    ttft = ttft or time.perf_counter() - begin
                    prefix = prefix or output.num_cached_tokens or 0
                    delta = delta_of(output, ttft, prefix)
                    if output.finished and delta.report is None and recipe is not None:
                        delta.report = BlendReport.from_plain(await self._call("report", ticket))
                    yield delta
        except TimeoutError:
            raise GenerationTimeoutError(
                f"no complete answer within {sampling.timeout_s:g} s: allow more time, or fewer tokens"
            ) from None
        except (ValueError, compat.VLLMClientError) as error:
            raise ConfigError(f"the engine refuses this request: {error}") from error
        except errors.BlendragError:
            raise
        except Exception as error:
            raise EngineError(f"the engine stopped while generating: {error}") from error


def _closed_meanwhile() -> EngineError:
    return EngineClosedError("the engine was closed while it was generating")
