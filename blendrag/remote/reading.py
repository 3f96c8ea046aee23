"""A server's stream, read into the pieces of an answer as embedded engines give them."""

from __future__ import annotations

import json
import time
from typing import Any

from blendrag.chat.answer import Answer, Piece, TokenLogprob, Usage
from blendrag.chat.calls import ended_by, read_calls, visible
from blendrag.chat.request import ChatRequest
from blendrag.errors import BrokenAnswerError, GenerationTimeoutError, ServerBusyError
from blendrag.remote.http import made, refusal, understood
from blendrag.serving.evidence import Evidence

_END = "[DONE]"


class Reader:
    """A reader of one answer's stream.

    begun: whether something of it came. ended: whether all of it did.
    """

    def __init__(self, request: ChatRequest) -> None:
        self._request, self.limit_s = request, request.sampling.timeout_s
        self._begin = time.perf_counter()
        self._ttft_s = 0.0
        self._reasoning = self._text = self._model = ""
        self._shown, self._finish_reason = 0, "stop"
        self._logprobs: list[TokenLogprob] = []
        self._calls: dict[int, tuple[str, str]] = {}
        self._usage: dict[str, Any] = {}
        self._facts: dict[str, Any] = {}
        self.begun = self.ended = False

    def feed(self, data: str) -> Piece | None:
        """Return what an event adds that is certain by now; at the end, the rest and the whole.

        Raises ServerBusyError, or BrokenAnswerError if the answer has begun, for an error in the stream;
        GenerationTimeoutError; ServerError for what is no answer.
        """
        with understood("the server"):
            return self._read(data)

    def _read(self, data: str) -> Piece | None:
        if data == _END:
            return self._end()
        event = _json(data)
        if (error := event.get("error")) is not None:
            about = error if isinstance(error, dict) else {"message": error}
            said, refused = f"the server failed: {about.get('message')}", about.get("code") == 400
            if refused and not self.begun:
                raise refusal(said)
            raise (BrokenAnswerError if self.begun else ServerBusyError)(said)
        if self.limit_s is not None and time.perf_counter() - self._begin > self.limit_s:
            raise self.late()
        self._model = event.get("model") or self._model
        self._usage = event.get("usage") or self._usage
        self._facts = event.get("blendrag") or self._facts
        for choice in event.get("choices") or ():
            return self._feed(choice)
        return None

    def _feed(self, choice: dict[str, Any]) -> Piece | None:
        self._ttft_s = self._ttft_s or time.perf_counter() - self._begin
        said = choice.get("delta") or choice  # of a chat; of a completion
        thought = said.get("reasoning") or said.get("reasoning_content") or ""
        self._reasoning += thought
        text = said.get("content") or said.get("text") or ""
        self._text += text
        self._logprobs += _logprobs(choice.get("logprobs") or {})
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        for part in said.get("tool_calls") or ():
            self.begun, function = True, part.get("function") or {}
            name, arguments = self._calls.get(part["index"], ("", ""))
            name, more = name + (function.get("name") or ""), function.get("arguments") or ""
            self._calls[part["index"]] = name, arguments + more
        if not text and not thought:
            return None
        self.begun = True
        shown = visible(self._text, self._request)
        piece, self._shown = shown[self._shown :], max(self._shown, len(shown))
        return Piece(piece, reasoning=thought)

    def _end(self) -> Piece:
        self.ended = True
        read = read_calls(self._text, [*self._calls.values()], self._request)
        evidence = self._evidence()
        answer = Answer(
            read.text,
            self._reasoning or None,
            sources=self._request.sources,
            finish_reason=ended_by(read, self._finish_reason),
            ttft_s=self._ttft_s,
            total_s=time.perf_counter() - self._begin,
            usage=Usage(
                input=evidence.prompt,
                output=self._usage.get("completion_tokens", 0),
                cache_read=evidence.reused + evidence.prefix,
                cache_creation=self._facts.get("stored", 0),
                recomputed=evidence.recomputed,
            ),
            evidence=evidence,
            tool_calls=read.calls,
            invalid_tool_calls=read.invalid,
            logprobs=tuple(self._logprobs),
            model=self._model,
        )
        return Piece(read.text[self._shown :], answer)

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
        """Check, at the end of the stream, that it is the answer's. Raises as :meth:`feed` does, if it is
        not."""
        if not self.ended:
            said = "the server ended the stream before the answer's end"
            raise (BrokenAnswerError if self.begun else ServerBusyError)(said)


def _json(data: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"error": f"it said {data[:80]!r}"}


def _logprobs(found: dict[str, Any]) -> list[TokenLogprob]:
    if "tokens" in found:  # of a completion
        rows = zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
        return [TokenLogprob(token, logprob, _ranked((top or {}).items())) for token, logprob, top in rows]
    return [
        TokenLogprob(
            one["token"],
            one["logprob"],
            _ranked((other["token"], other["logprob"]) for other in one["top_logprobs"]),
        )
        for one in found.get("content") or ()
    ]


def _ranked(pairs: Any) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(pairs, key=lambda pair: -pair[1]))
