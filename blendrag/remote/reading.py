"""A server's stream, read into the pieces of an answer as embedded engines give them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import Any

import httpx2

from blendrag.chat.answer import Piece, TokenLogprob
from blendrag.chat.attempt import Attempt
from blendrag.chat.calls import read_calls
from blendrag.chat.request import ChatRequest
from blendrag.errors import BlendragError, BrokenAnswerError, GenerationTimeoutError, ServerBusyError
from blendrag.remote.http import Server, made, refusal, require_blendrag, understood
from blendrag.serving.evidence import Evidence

_END = "[DONE]"
_EVENT_BYTES = 64 << 20  # evidence has a row for each document
_LAST_LINES = "\n\n"  # of an event that was not ended
_REST_S = 0.2  # for a connection to end behind an answer, so that it may be used again


class Reader(Attempt):
    """A reader of one answer's stream, which comes when the server is sent what it is ``asked``.

    begun: whether something of it came. ended: whether all of it did.
    """

    asked: tuple[str, str, dict[str, Any]]

    def __init__(self, server: Server, request: ChatRequest) -> None:
        super().__init__(request)
        self._server, self.limit_s = server, request.sampling.timeout_s
        self._model, self._finish_reason = "", "stop"
        self._calls: dict[int, tuple[str, str]] = {}
        self._usage: dict[str, Any] = {}
        self._facts: dict[str, Any] = {}
        self.begun = self.ended = False

    def pieces(self) -> Generator[Piece]:
        with self.clear(), self._server.answer(*self.asked, **timeout_of(self._request)) as response:
            require_blendrag(self._server, response)
            watched = functools.partial(self._watched, response, response.iter_text())
            response.iter_text = watched  # type: ignore[method-assign]
            for event in httpx2.EventSource(response, _EVENT_BYTES):
                if (piece := self.feed(event.data)) is not None:
                    yield piece
            self.check()

    async def apieces(self) -> AsyncGenerator[Piece]:
        with self.clear():
            async with self._server.aanswer(*self.asked, **timeout_of(self._request)) as response:
                require_blendrag(self._server, response)
                watched = functools.partial(self._awatched, response.aiter_text())
                response.aiter_text = watched  # type: ignore[method-assign]
                async for event in httpx2.EventSource(response, _EVENT_BYTES):
                    if (piece := self.feed(event.data)) is not None:
                        yield piece
                self.check()

    def _watched(self, response: httpx2.Response, texts: Iterator[str]) -> Generator[str]:
        """Yield a stream's texts up to the answer's end. Looks at the clock for each: a proxy's comments make
        no events. What is behind the end, or how that breaks off, is no matter of the answer's."""
        for text in texts:
            self._check_time()
            yield text
            if self.ended:
                break
        else:
            yield _LAST_LINES
        with contextlib.suppress(httpx2.RequestError), _cut_off(response):
            deque(texts, maxlen=0)

    async def _awatched(self, texts: AsyncIterator[str]) -> AsyncGenerator[str]:
        """Do as ``_watched`` in an event loop."""
        async for text in texts:
            self._check_time()
            yield text
            if self.ended:
                break
        else:
            yield _LAST_LINES
        with contextlib.suppress(httpx2.RequestError, TimeoutError):
            async with asyncio.timeout(_REST_S):
                async for _ in texts:
                    pass

    def _check_time(self) -> None:
        if self.limit_s is not None and time.perf_counter() - self._begin > self.limit_s:
            raise self.late()

    @contextlib.contextmanager
    def clear(self) -> Generator[None]:
        """Say of what fails inside that the answer had begun, or that it took too long."""
        try:
            yield
        except (BrokenAnswerError, GenerationTimeoutError):
            raise
        except BlendragError as error:
            cause = error.__cause__
            if self.limit_s is not None and isinstance(cause, httpx2.TimeoutException):
                raise self.late() from None
            if self.begun:
                raise BrokenAnswerError(f"the answer broke off after it had begun: {error}") from cause
            raise

    def feed(self, data: str) -> Piece | None:
        """Return what an event adds that is certain by now; at the end, the rest and the whole.

        Raises ServerBusyError, or BrokenAnswerError if the answer has begun, for an error in the stream;
        GenerationTimeoutError; ServerError for what is no answer.
        """
        data = data.strip()
        if not data or self.ended:  # an event without data: a proxy's
            return None
        with understood("the server"):
            if data == _END:
                return self._end()
            event = _json(data)
            if (error := event.get("error")) is not None:
                about = error if isinstance(error, dict) else {"message": error}
                message = f"the server failed: {about.get('message')}"
                if about.get("code") == 400 and not self.begun:
                    raise refusal(message)
                raise self._broken(message)
            self._model = event.get("model") or self._model
            self._usage = event.get("usage") or self._usage
            self._facts = event.get("blendrag") or self._facts
            choices = event.get("choices")
            return self._feed(choices[0]) if choices else None

    def _feed(self, choice: dict[str, Any]) -> Piece | None:
        self._ttft_s = self._ttft_s or time.perf_counter() - self._begin
        delta = choice.get("delta") or choice  # of a chat; of a completion
        thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
        text = delta.get("content") or delta.get("text") or ""
        self._add(text, thought, _logprobs(choice.get("logprobs") or {}))
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        for part in delta.get("tool_calls") or ():
            self.begun, function = True, part.get("function") or {}
            name, arguments = self._calls.get(index := part.get("index") or 0, ("", ""))
            name, more = name + (function.get("name") or ""), function.get("arguments") or ""
            self._calls[index] = name, arguments + more
        if not text and not thought:
            return None
        self.begun = True
        return self._certain(thought)

    def _end(self) -> Piece:
        self.ended = True
        return self._whole(
            read_calls(self._text, [*self._calls.values()], self._request),
            self._evidence(),
            tokens=self._usage.get("completion_tokens", 0),
            stored=self._facts.get("stored", 0),
            finish_reason=self._finish_reason,
            model=self._model,
        )

    def _evidence(self) -> Evidence:
        """Return the server's evidence; of a prompt that it has not planned, it knows only why."""
        prompt = self._usage.get("prompt_tokens", 0)
        facts = dict(self._facts)
        if "prompt" not in facts:
            prefix = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            facts |= {"prompt": prompt, "fresh": prompt - prefix, "prefix": prefix}
        facts["documents"] = tuple(facts.get("documents", ()))
        facts["trace"] = tuple(tuple(event) for event in facts.get("trace", ()))
        return made(Evidence, facts)

    def late(self) -> GenerationTimeoutError:
        return GenerationTimeoutError(
            f"no complete answer within {self.limit_s:g} s: allow more time, or fewer tokens"
        )

    def check(self) -> None:
        """Check that the stream's end is the answer's. Raises as :meth:`feed` does."""
        if not self.ended:
            raise self._broken("the server ended the stream before the answer's end")

    def _broken(self, message: str) -> BlendragError:
        return (BrokenAnswerError if self.begun else ServerBusyError)(message)


def timeout_of(request: ChatRequest) -> dict[str, Any]:
    """Return a request's limit in seconds as the server's connections take it."""
    limit = request.sampling.timeout_s
    return {} if limit is None else {"timeout": limit}


@contextlib.contextmanager
def _cut_off(response: httpx2.Response) -> Generator[None]:
    """End a connection that is still read after a moment. Its own timeout is that of a silent server."""
    stream = response.extensions.get("network_stream")
    if stream is None or response.http_version == "HTTP/2":  # which has other answers on it
        yield
        return
    timer = threading.Timer(_REST_S, stream.get_extra_info("socket").shutdown, [socket.SHUT_RDWR])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _json(data: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"error": f"it said {data[:80]!r}"}


def _logprobs(found: dict[str, Any]) -> list[TokenLogprob]:
    if "tokens" in found:  # of a completion
        rows = zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
        return [TokenLogprob.of(token, logprob, (top or {}).items()) for token, logprob, top in rows]
    return [
        TokenLogprob.of(
            one["token"],
            one["logprob"],
            ((other["token"], other["logprob"]) for other in one["top_logprobs"]),
        )
        for one in found.get("content") or ()
    ]
