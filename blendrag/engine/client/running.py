"""A running engine, whoever has started it: its worker's operations, and generation."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, TypeVar

from blendrag import errors
from blendrag.engine.client.continuation import Continuation
from blendrag.engine.client.generation import (
    Delta,
    Sampling,
    delta_of,
    vllm_prompt,
    vllm_reasoning,
    vllm_sampling,
)
from blendrag.engine.client.launch import SERVING, WorkerExtension
from blendrag.engine.client.pieces import Pieces, Put
from blendrag.engine.client.prior_turns import PriorTurns
from blendrag.engine.wire.operations import EngineFacts
from blendrag.engine.wire.recipe import SECRET, Recipe, sealed
from blendrag.engine.wire.report import BlendReport
from blendrag.errors import (
    ConfigError,
    EngineClosedError,
    EngineError,
    GenerationTimeoutError,
    PromptTooLongError,
)
from blendrag.settings import Settings

T = TypeVar("T")

_TRANSFER = "kv_transfer_params"

_CALL_TIMEOUT_S = 600.0  # for one batch of an ingest, or to open a store
_LOOK_S = 0.25  # seconds between looks at whether the engine still runs, while a call waits


class RunningEngine:
    """A running engine: a vLLM ``AsyncLLM`` and the event loop that it runs in. Safe to use from any thread
    or loop, except that a method that waits must not be called in that loop."""

    _llm: Any
    _loop: asyncio.AbstractEventLoop
    facts: EngineFacts
    log: Path | None = None
    """The file with what vLLM logs; None: it logs to the terminal, or to the server's own log."""

    def __init__(
        self, settings: Settings, extension: WorkerExtension = SERVING, *, alone: bool = True
    ) -> None:
        """Describe an engine that is yet to start. alone: whether the engine has no other client."""
        self.settings, self.extension, self.alone = settings, extension, alone
        self._ids = itertools.count()
        self.turns = PriorTurns(alone=alone)
        self._slicing = asyncio.Lock()
        self._name = uuid.uuid4().hex
        self._closed = False
        self._waiting = set[Future[Any]]()

    def release(self) -> None:
        """Give the engine back."""

    async def bound(self) -> EngineFacts:
        """Return what the workers report once they are bound to their model. Raises ConfigError where the
        settings do not fit the model."""
        from blendrag.compress import check_budget

        bound = await self._while_alive(self._llm.collective_rpc("blendrag_bind"), "its start")
        facts = EngineFacts(**bound[0])
        check_budget(self.settings.blending, facts.block_size)
        return facts

    # -- what it knows ------------------------------------------------------------------------------------

    @property
    def blends(self) -> bool:
        """Return whether this model can be blended. If not, ``facts.reason`` says why."""
        return not self.facts.reason

    @property
    def alive(self) -> bool:
        """Return whether the engine can still be used."""
        return not self._closed and not self._llm.errored

    @property
    def max_model_len(self) -> int:
        from blendrag.engine.compat.requests import window_of

        return window_of(self._llm)

    # -- calls --------------------------------------------------------------------------------------------

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            work.close()
            raise EngineClosedError("this engine was closed: open a new one")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    def _end_calls(self) -> None:
        """Accept no more calls, and tell the waiting ones that the engine is closed."""
        self._closed = True
        for future in list(self._waiting):
            future.cancel()

    def call(self, operation: str, *args: Any) -> Any:
        """Run one of the worker's operations on plain data, and wait for it (see :class:`StoreClient`)."""
        return self._result(self.acall(operation, *args))

    def _result(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return self._submit(work).result()
        except CancelledError:
            raise _closed_meanwhile() from None

    async def _while_alive(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Return the result of a call to the engine's processes. Raises EngineError within a second of their
        end, after which vLLM leaves calls unanswered."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=_LOOK_S))[0]:
                if self._llm.errored:
                    raise self._died(what)
            return task.result()
        finally:
            task.cancel()

    async def _has_died(self) -> bool:
        """Return whether an engine at which something failed has died. When a worker ends, its calls fail a
        moment before the engine does."""
        ends = time.monotonic() + 4 * _LOOK_S
        while not self._llm.errored and time.monotonic() < ends:
            await asyncio.sleep(_LOOK_S / 10)
        return bool(self._llm.errored)

    def _died(self, what: str) -> EngineError:
        if self._closed:
            return _closed_meanwhile()
        return EngineError(f"the engine died at {what}: {self.log or 'its log'} says why")

    def call_later(self, operation: str, *args: Any) -> Future[Any]:
        """Do as :meth:`call`, without waiting."""
        return self._submit(self.acall(operation, *args))

    def calls_later(self, *calls: Sequence[Any]) -> Future[None]:
        """Run several calls, (operation, arguments...) each, one after the other, without waiting."""
        return self._submit(self._calls(calls))

    async def _calls(self, calls: Sequence[Sequence[Any]]) -> None:
        for operation, *args in calls:
            await self.acall(operation, *args)

    async def acall(self, operation: str, *args: Any) -> Any:
        """Do as :meth:`call`, in the engine's own loop."""
        from blendrag.engine.compat.requests import answers_of_all

        limit, number = _CALL_TIMEOUT_S, next(self._ids)

        async def ask(method: str, *about: Any) -> list[dict[str, Any]]:
            call = answers_of_all(self._llm, method, (self._name, number, *about))
            return await self._while_alive(call, operation)

        try:
            async with asyncio.timeout(limit):
                answers = await ask("blendrag_call", operation, *args)
            if any("more" in answer for answer in answers):
                # Call one at a time: the engine takes a step only when no call is waiting.
                async with self._slicing, asyncio.timeout(limit):
                    while any("more" in answer for answer in answers):
                        later = await ask("blendrag_go_on")
                        answers = [
                            new if "more" in old else old for old, new in zip(answers, later, strict=True)
                        ]
        except TimeoutError:
            raise EngineError(f"the engine did not end {operation} within {limit:g} s") from None
        except EngineError:
            raise
        except Exception as error:
            if await self._has_died():
                raise self._died(operation) from error
            raise EngineError(f"the engine failed at {operation}: {error}") from error
        for answer in answers:
            if "error" in answer:
                name, message = answer["error"]
                raise getattr(errors, name, EngineError)(message)
        return next((answer["ok"] for answer in answers if answer["ok"] is not None), None)

    @property
    def idle(self) -> bool:
        """Return whether no request of any client is under way."""
        from blendrag.engine.compat.requests import has_unfinished

        return not (self._slicing.locked() or has_unfinished(self._llm))

    def reset_prefix_cache(self) -> bool:
        """Forget all exact and blended prefixes. Returns False, and forgets nothing, while a request holds
        any KV."""
        return self._result(self._while_alive(self._llm.reset_prefix_cache(), "forgetting prefixes"))

    # -- generation ---------------------------------------------------------------------------------------

    # namespace: the tenant. The prefix cache keeps its prompts apart from others', blended or not.

    def generate(
        self, token_ids: Sequence[int], sampling: Sampling, recipe: Recipe | None = None, namespace: str = ""
    ) -> Delta:
        """Return the whole completion as one piece."""
        return self._result(_whole(self._deltas(token_ids, sampling, recipe, namespace)))

    async def agenerate(
        self, token_ids: Sequence[int], sampling: Sampling, recipe: Recipe | None = None, namespace: str = ""
    ) -> Delta:
        """Do as :meth:`generate`, in any event loop. Cancelling it stops the generation."""
        whole = _whole(self._deltas(token_ids, sampling, recipe, namespace))
        return await asyncio.wrap_future(self._submit(whole))

    def begin(
        self, token_ids: Sequence[int], sampling: Sampling, recipe: Recipe | None = None, namespace: str = ""
    ) -> Pieces:
        """Begin a generation now, whoever reads it later."""
        deltas = self._deltas(token_ids, sampling, recipe, namespace)
        return Pieces(lambda put: self._submit(_feed(put, deltas)))

    def stream(
        self, token_ids: Sequence[int], sampling: Sampling, recipe: Recipe | None = None, namespace: str = ""
    ) -> Generator[Delta]:
        """Yield pieces as they come. Closing the iterator stops the generation."""
        yield from self.begin(token_ids, sampling, recipe, namespace).stream()

    async def astream(
        self, token_ids: Sequence[int], sampling: Sampling, recipe: Recipe | None = None, namespace: str = ""
    ) -> AsyncGenerator[Delta]:
        """Do as :meth:`stream`, in any event loop."""
        pieces = self.begin(token_ids, sampling, recipe, namespace).astream()
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                yield piece

    async def _deltas(
        self, token_ids: Sequence[int], sampling: Sampling, recipe: Recipe | None, namespace: str
    ) -> AsyncIterator[Delta]:
        from blendrag.engine.compat.requests import VLLMClientError, tokenizer_of

        if sampling.forced and not self.extension.logits_processors:
            raise ConfigError("forced tokens are for an engine of the laboratory (blendrag.lab.running)")
        rest: Continuation | None = None
        if sampling.given:
            rest = Continuation(tokenizer_of(self._llm), token_ids, sampling)
            token_ids, sampling = rest.token_ids, rest.sampling
        room = self.max_model_len - len(token_ids)
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {len(token_ids)} tokens, the model's window {self.max_model_len}:"
                " ask for fewer documents, or use a model with a longer window"
            )
        ticket = f"blendrag-{next(self._ids)}"
        prompt = vllm_prompt(list(token_ids), recipe, self.turns, namespace)
        params = vllm_sampling(sampling, room, recipe, ticket)
        if (transfer := (params.extra_args or {}).get(_TRANSFER)) and (secret := os.environ.get(SECRET)):
            params.extra_args[_TRANSFER] = sealed(transfer, prompt.get("cache_salt"), secret)
        exact = sampling.path is not None and sampling.path.held > 0
        begin, ttft, prefix = time.perf_counter(), 0.0, 0
        try:
            outputs = self._llm.generate(prompt, params, ticket, **vllm_reasoning(sampling))
            async with asyncio.timeout(sampling.timeout_s), contextlib.aclosing(outputs):
                async for output in outputs:
                    ttft = ttft or time.perf_counter() - begin
                    prefix = prefix or output.num_cached_tokens or 0
                    delta = delta_of(output, ttft, prefix)
                    if rest:
                        delta = rest.read(delta)
                    ended = delta.finish_reason is not None
                    if ended and delta.report is None and (recipe or exact):
                        delta.report = BlendReport.from_plain(await self.acall("report", ticket))
                    yield delta
                    if ended and not output.finished:  # by a stop that the engine does not know of
                        break
        except TimeoutError:
            raise GenerationTimeoutError(
                f"no complete answer within {sampling.timeout_s:g} s: allow more time, or fewer tokens"
            ) from None
        except (ValueError, VLLMClientError) as error:
            raise ConfigError(f"the engine refuses this request: {error}") from error
        except errors.BlendragError:
            raise
        except Exception as error:
            if await self._has_died():
                raise self._died("generating") from error
            raise EngineError(f"the engine stopped while generating: {error}") from error


async def _feed(put: Put, deltas: AsyncIterator[Delta]) -> None:
    try:
        async for delta in deltas:
            put(delta)
        put(None)
    except asyncio.CancelledError:  # by the reader, who is gone; or by close()
        put(_closed_meanwhile())
        raise
    except Exception as error:
        put(error)


async def _whole(deltas: AsyncIterator[Delta]) -> Delta:
    whole: Delta | None = None
    async for delta in deltas:
        whole = delta if whole is None else whole.joined(delta)
    if whole is None:
        raise EngineError("the engine ended a request without an answer")
    return whole


def _closed_meanwhile() -> EngineError:
    return EngineClosedError("the engine was closed meanwhile")
