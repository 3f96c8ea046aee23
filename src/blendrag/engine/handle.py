"""The embedded engine: one vLLM ``AsyncLLM`` per configuration and process, owned by one background loop."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from blendrag import errors
from blendrag.engine.launch import engine_args, engine_environment, main_not_imported_again, require_vllm
from blendrag.engine.recipe import FIELD, Recipe
from blendrag.errors import EngineError, PromptTooLongError
from blendrag.models import resolve_model
from blendrag.settings import Settings

T = TypeVar("T")
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a completion is generated. ``logprobs``: number of top log probabilities wanted per token."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: int | None = None


@dataclass(slots=True)
class Delta:
    """A piece of a completion as it is generated. The last one carries ``finish_reason`` and ``report``.

    ttft_s: seconds from the request to its first token.
    prefix_tokens: prompt tokens that were not computed by the engine itself (blended or prefix-cached).
    report: what the fused prefill did; {"fallback": reason} when the prompt was prefilled plainly instead.
    logprobs: per token, {token id: log probability}.
    """

    text: str
    token_ids: list[int]
    ttft_s: float
    finish_reason: str | None = None
    prefix_tokens: int = 0
    report: dict[str, Any] | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)


class Engine:
    """Get one with :meth:`shared`; give it back with :meth:`release`. Safe to use from any thread or loop."""

    _shared: ClassVar[dict[tuple[Any, ...], Engine]] = {}
    _lock: ClassVar[Any] = threading.Lock()

    def __init__(self, settings: Settings, progress: Progress | None = None) -> None:
        self.settings = settings
        self._users = 0
        self._ids = itertools.count()
        self._closed = False
        note = progress or (lambda _: None)
        require_vllm()
        self.model_path: Path = resolve_model(
            settings.model, cache_dir=settings.cache_dir, revision=settings.revision, progress=note
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="blendrag-engine", daemon=True)
        self._thread.start()
        note("starting the engine")
        try:
            self.facts: dict[str, Any] = self._submit(self._start()).result()
        except errors.BlendragError:
            self._stop_loop()
            raise
        except Exception as error:
            self._stop_loop()
            raise EngineError(
                f"the engine did not start with {settings.model}: {error}"
                " (VLLM_LOGGING_LEVEL=INFO shows vLLM's own log)"
            ) from error
        atexit.register(self.close)

    async def _start(self) -> dict[str, Any]:
        with engine_environment(self.settings):
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            args = AsyncEngineArgs(**engine_args(self.settings, self.model_path))
            with main_not_imported_again():
                self._llm = AsyncLLM.from_engine_args(args)
        facts: dict[str, Any] = (await self._llm.collective_rpc("blendrag_bind"))[0]
        return facts

    # -- sharing ------------------------------------------------------------------------------------------

    @classmethod
    def shared(cls, settings: Settings, progress: Progress | None = None) -> Engine:
        """The engine of this configuration, started if it is not running. Blocks for its start."""
        key = tuple(
            getattr(settings, name)
            for name in (
                "model", "revision", "dtype", "max_model_len", "kv_cache_gib", "max_num_seqs",
                "max_num_batched_tokens", "mask", "prefix_caching", "enforce_eager", "cache_dir",
            )
        )  # fmt: skip
        with cls._lock:
            engine = cls._shared.get(key)
            if engine is None or engine._closed or engine._llm.errored:
                engine = cls._shared[key] = cls(settings, progress)
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
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._loop.call_soon_threadsafe(self._llm.shutdown)
        self._submit(asyncio.sleep(0)).result()
        self._stop_loop()

    def _stop_loop(self) -> None:
        async def cancel_all() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._submit(cancel_all()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- what it knows ------------------------------------------------------------------------------------

    @property
    def blends(self) -> bool:
        """Whether this model can be blended; ``facts["reason"]`` says why not."""
        return not self.facts["reason"]

    @property
    def max_model_len(self) -> int:
        return int(self._llm.model_config.max_model_len)

    # -- calls --------------------------------------------------------------------------------------------

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, method: str, *args: Any) -> Any:
        """Run one of the data plane's operations in the worker (see ``engine.worker``) and wait for it."""
        return self._submit(self._call(method, *args)).result()

    def call_later(self, method: str, *args: Any) -> Future[Any]:
        """``call`` without waiting."""
        return self._submit(self._call(method, *args))

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            answer = (await self._llm.collective_rpc("blendrag_call", args=(method, *args)))[0]
        except Exception as error:
            raise EngineError(f"the engine failed at {method}: {error}") from error
        if "error" in answer:
            name, message = answer["error"]
            raise getattr(errors, name, EngineError)(message)
        return answer["ok"]

    def reset_prefix_cache(self) -> bool:
        """Forget all exact and blended prefixes; False, and nothing done, while a request holds any KV."""
        return self._submit(self._llm.reset_prefix_cache()).result()

    # -- generation ---------------------------------------------------------------------------------------

    def generate(self, token_ids: Sequence[int], sampling: Sampling, recipe: Recipe | None = None) -> Delta:
        """The whole completion as one piece."""
        return self._submit(self._whole(token_ids, sampling, recipe)).result()

    async def agenerate(
        self, token_ids: Sequence[int], sampling: Sampling, recipe: Recipe | None = None
    ) -> Delta:
        """``generate`` for any event loop. Cancelling it stops the generation."""
        return await asyncio.wrap_future(self._submit(self._whole(token_ids, sampling, recipe)))

    def stream(
        self, token_ids: Sequence[int], sampling: Sampling, recipe: Recipe | None = None
    ) -> Iterator[Delta]:
        """Pieces as they come. Closing the iterator stops the generation."""
        pieces: queue.Queue[Delta | BaseException | None] = queue.Queue()
        task = self._submit(self._feed(pieces.put, token_ids, sampling, recipe))
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            task.cancel()

    async def astream(
        self, token_ids: Sequence[int], sampling: Sampling, recipe: Recipe | None = None
    ) -> AsyncIterator[Delta]:
        """``stream`` for any event loop."""
        pieces: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        task = self._submit(
            self._feed(
                lambda piece: loop.call_soon_threadsafe(pieces.put_nowait, piece),
                token_ids,
                sampling,
                recipe,
            )
        )
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
    ) -> None:
        try:
            async for delta in self._deltas(token_ids, sampling, recipe):
                put(delta)
            put(None)
        except Exception as error:
            put(error)

    async def _whole(self, token_ids: Sequence[int], sampling: Sampling, recipe: Recipe | None) -> Delta:
        whole: Delta | None = None
        async for delta in self._deltas(token_ids, sampling, recipe):
            if whole is None:
                whole = delta
                continue
            delta.text = whole.text + delta.text
            delta.token_ids = whole.token_ids + delta.token_ids
            delta.logprobs = whole.logprobs + delta.logprobs
            whole = delta
        if whole is None:
            raise EngineError("the engine ended a request without an answer")
        return whole

    async def _deltas(
        self, token_ids: Sequence[int], sampling: Sampling, recipe: Recipe | None
    ) -> AsyncIterator[Delta]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        room = self.max_model_len - len(token_ids)
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {len(token_ids)} tokens, the model's window {self.max_model_len}:"
                " ask for fewer documents (top_k) or use a model with a longer window"
            )
        ticket = f"blendrag-{next(self._ids)}"
        prompt: dict[str, Any] = {"prompt_token_ids": list(token_ids)}
        if recipe is not None:
            prompt["cache_salt"] = recipe.cache_salt()
        params = SamplingParams(
            max_tokens=min(sampling.max_tokens, room),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop=list(sampling.stop),
            seed=sampling.seed,
            logprobs=sampling.logprobs,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_transfer_params": recipe.transfer_params(ticket)} if recipe else None,
        )
        begin, ttft, prefix = time.perf_counter(), 0.0, 0
        try:
            async for output in self._llm.generate(prompt, params, ticket):
                ttft = ttft or time.perf_counter() - begin
                prefix = prefix or output.num_cached_tokens or 0
                piece = output.outputs[0]
                report = (output.kv_transfer_params or {}).get(FIELD) if output.finished else None
                if output.finished and report is None and recipe is not None:
                    report = await self._call("report", ticket)
                yield Delta(
                    text=piece.text,
                    token_ids=list(piece.token_ids),
                    ttft_s=ttft,
                    finish_reason=piece.finish_reason,
                    prefix_tokens=prefix,
                    report=report,
                    logprobs=[{i: lp.logprob for i, lp in at.items()} for at in piece.logprobs or ()],
                )
        except (ValueError, asyncio.CancelledError, errors.BlendragError):
            raise
        except Exception as error:
            raise EngineError(f"the engine stopped while generating: {error}") from error
