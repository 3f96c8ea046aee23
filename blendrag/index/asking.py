"""Sending a planned prompt to the engine, and putting the answer together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Generator, Iterator
from dataclasses import replace
from typing import Any, TypedDict

from blendrag.engine.client.generation import Delta, Sampling
from blendrag.errors import BlendragError, ConfigError
from blendrag.index.answer import Answer, Source
from blendrag.index.prompting import Prompt, Prompter
from blendrag.serving.evidence import evidence_of
from blendrag.serving.library import Messages
from blendrag.settings import Settings


class AskOptions(TypedDict, total=False):
    """Options of a question; None stands for the setting.

    top_k: chunks retrieved. history: earlier messages, ``{"role": ..., "content": ...}``.
    blend: False prefills the same prompt plainly, for comparison. hints: texts to look for first in a prompt
    of one's own. conversation: an id of the conversation that the prompt belongs to, whose earlier questions
    are remembered; a prompt without one counts as the only one. The rest are fields of ``Sampling``.
    """

    top_k: int | None
    history: Messages
    blend: bool | None
    hints: list[str]
    conversation: str | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    stop: tuple[str, ...] | list[str]
    seed: int | None


class AnswerStream:
    """Pieces of an answer's text as they are generated; afterwards ``answer`` holds the whole."""

    def __init__(self, pieces: Generator[str | Answer]) -> None:
        self._pieces = pieces
        self.answer: Answer | None = None

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces:
            if isinstance(piece, Answer):
                self.answer = piece
            else:
                yield piece

    def close(self) -> None:
        """Stop generating."""
        self._pieces.close()


class Request:
    """One prompt on its way: what is sent, and what comes back."""

    def __init__(self, prompter: Prompter, prompt: str | Messages, options: AskOptions) -> None:
        self._library = prompter.library
        self.prompt = make_prompt(prompter, prompt, options)
        self._conversation = options.get("conversation")
        history = options.get("history", ())
        self._said = prompt if not history else [*history, {"role": "user", "content": prompt}]
        blend, blending = options.get("blend"), self._library.settings.blending
        how = blending if blend is None else replace(blending, blend=blend)
        self.recipe, self._plain = self._library.recipe(self.prompt.plan, how)
        self._options = options
        self._begin = time.perf_counter()
        self._text: list[str] = []
        self._tokens = 0
        self._last: Delta | None = None

    @property
    def sampling(self) -> Sampling:
        chosen = sampling(self._library.settings, self._options)
        if (forecaster := self._library.forecaster) and self._conversation:
            return forecaster.named(chosen, self._said, self.prompt.plan, self._conversation)
        return chosen

    def add(self, delta: Delta) -> str:
        self._text.append(delta.text)
        self._tokens += len(delta.token_ids)
        self._last = delta
        return delta.text

    def answer(self) -> Answer:
        last = self._last
        assert last is not None, "the engine ends every request with a piece"
        evidence = evidence_of(self.prompt.plan, self.recipe, self._plain, last)
        if evidence.missing:
            with contextlib.suppress(BlendragError):  # the answer is there, whatever becomes of the KV
                self._library.repair(evidence.missing)
        if forecaster := self._library.forecaster:
            said = self._said if self._conversation else ""  # a question by itself has nothing to go on with
            seconds = time.perf_counter() - self._begin
            forecaster.answered(said, self.prompt.plan, self._conversation, self._tokens, seconds)
        return Answer(
            "".join(self._text),
            tuple(Source.of(hit) for hit in self.prompt.hits),
            last.ttft_s,
            time.perf_counter() - self._begin,
            last.finish_reason,
            self._tokens,
            evidence,
        )


def make_prompt(prompter: Prompter, prompt: str | Messages, options: AskOptions) -> Prompt:
    """A question is answered from retrieved documents; messages are a prompt of the user's own."""
    unknown = set(options) - set(AskOptions.__annotations__)
    if unknown:
        raise ConfigError(
            f"unknown option {sorted(unknown)[0]!r}; there are {', '.join(AskOptions.__annotations__)}"
        )
    if isinstance(prompt, str):
        return prompter.from_question(prompt, options.get("top_k"), options.get("history", ()))
    return prompter.from_messages(prompt, options.get("hints", ()))


def sampling(settings: Settings, options: AskOptions) -> Sampling:
    """The options' sampling, with the settings where they say nothing."""
    given: dict[str, Any] = {"max_tokens": settings.max_tokens, "temperature": settings.temperature}
    for name in ("max_tokens", "temperature", "top_p", "seed"):
        if options.get(name) is not None:
            given[name] = options.get(name)
    return Sampling(**given, stop=tuple(options.get("stop", ())))


def stream(prompter: Prompter, prompt: str | Messages, options: AskOptions) -> Generator[str | Answer]:
    """Pieces of text, and at the end the answer. Closing it stops the generation."""
    request = Request(prompter, prompt, options)
    library = prompter.library
    engine = library.start()
    ids, namespace = request.prompt.plan.token_ids, library.identity.namespace
    with contextlib.closing(engine.stream(ids, request.sampling, request.recipe, namespace)) as deltas:
        for delta in deltas:
            yield request.add(delta)
    yield request.answer()


async def astream(
    prompter: Prompter, prompt: str | Messages, options: AskOptions
) -> AsyncIterator[str | Answer]:
    """``stream`` for an event loop, which is not blocked."""
    import asyncio

    request = await asyncio.to_thread(Request, prompter, prompt, options)
    library = prompter.library
    engine = await asyncio.to_thread(library.start)
    ids, namespace = request.prompt.plan.token_ids, library.identity.namespace
    deltas = engine.astream(ids, request.sampling, request.recipe, namespace)
    async with contextlib.aclosing(deltas):
        async for delta in deltas:
            yield request.add(delta)
    yield request.answer()
