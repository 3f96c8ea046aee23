"""One request on its way: how it is put to the engine, and what becomes of the engine's pieces."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import replace

from blendrag.chat.answer import Piece, token_logprobs
from blendrag.chat.attempt import Attempt
from blendrag.chat.calls import read_answer
from blendrag.chat.request import ChatRequest
from blendrag.chat.tools import answer_grammar, templated, whole_tool
from blendrag.engine.client.continuation import can_go_on
from blendrag.engine.client.generation import Delta, Sampling
from blendrag.engine.client.pieces import Pieces
from blendrag.engine.client.reasoning import HARMONY_PARSER, Reasoning, thinking_parser
from blendrag.engine.client.tool_parser import ToolParser, tool_parser_name
from blendrag.engine.wire.recipe import Recipe
from blendrag.errors import BlendragError
from blendrag.prompt import PromptPlan
from blendrag.serving.evidence import Speculated
from blendrag.serving.library import Library
from blendrag.settings import AUTO_PARSER, Settings


def plan_request(library: Library, request: ChatRequest) -> PromptPlan:
    """Return the prompt that a request becomes. Raises ModelError if the template takes no form of it."""
    if request.plan is not None:
        return request.plan
    if isinstance(request.messages, str):
        return library.plan(request.messages, request.documents)
    messages, options = templated(library.tokenizer, request)
    return library.plan(messages, request.documents, **options)


class Turn(Attempt):
    """One request's turn on the engine: fed with the engine's pieces, it gives those of the answer."""

    def __init__(self, library: Library, settings: Settings, request: ChatRequest) -> None:
        self._library, self._settings = library, settings
        self.engine = library.start()
        self.plan = plan_request(library, request)
        super().__init__(request.within(self.engine.max_model_len - len(self.plan.token_ids)))
        self._options = request.options or settings.blending
        self._prompt = library.prepare(self.plan, self._options)
        self._begin = time.perf_counter()
        self._tools = self._tool_parser()
        self._skip_special_tokens: bool = request.sampling.other.get("skip_special_tokens", True)
        if self._tools:
            self._skip_special_tokens &= self._tools.skip_special_tokens
        self._reader: Reasoning | None = None
        if name := thinking_parser(settings.reasoning_parser, library.tokenizer):
            reader = Reasoning(
                name,
                library.tokenizer,
                self.plan.token_ids,
                request.chat_template_kwargs,
                automatic=settings.reasoning_parser == AUTO_PARSER,
                skip_special_tokens=self._skip_special_tokens,
            )
            # Held to a grammar from its first token on, gpt-oss writes no channels.
            if name != HARMONY_PARSER or reader.comes_first or not request.held:
                self._reader, self._skip_special_tokens = reader, reader.skip_special_tokens
        if self._tools:
            self._tools.read_behind(self._reader)
        self._tokens: list[int] = []
        self._resumed: dict[str, int] = {}
        self._pieces: Pieces | None = None
        self.speculation: Speculated = "none"
        self.on_first_token: Callable[[float], None] = lambda ttft_s: None
        """Called with the engine's TTFT, in seconds."""

    def _tool_parser(self) -> ToolParser | None:
        """Return what reads calls that the model may make; calls held by a grammar are JSON."""
        request = self._request
        if not request.offered or request.held:
            return None
        tools = [whole_tool(tool) for tool in request.offered]
        tokenizer, variables = self._library.tokenizer, request.chat_template_kwargs
        name = tool_parser_name(self._settings.tool_parser, tokenizer)
        return ToolParser(name, tokenizer, tools, variables) if name else None

    @property
    def sampling(self) -> Sampling:
        """The request's sampling, held to a schema or call once the model has thought."""
        request, grammar = self._request, answer_grammar(self._request)
        given = tuple(self._tokens)
        sampling = replace(request.sampling, path=self._prompt.path, given=given, grammar=grammar)
        if self._reader and sampling.grammar and self._reader.comes_first:
            sampling = replace(sampling, thinks_first=request.chat_template_kwargs)
        if self._reader or self._tools:
            special = {"skip_special_tokens": self._skip_special_tokens}
            sampling = replace(sampling, other={**sampling.other, **special})
        return sampling

    # -- the engine's pieces ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to generate, whoever reads it."""
        self._pieces = self.engine.begin(*self._asked)

    def adopt(self) -> None:
        """Take over an answer that was begun before it was asked for."""
        self._begin, self.speculation = time.perf_counter(), "adopted"

    def cancel(self) -> None:
        """Stop an answer that was begun."""
        if self._pieces is not None:
            self._pieces.cancel()

    @property
    def running(self) -> bool:
        """Return whether an answer that was begun has not ended yet."""
        return self._pieces is not None and self._pieces.running

    @property
    def failed(self) -> bool:
        """Return whether an answer that was begun has ended with an error."""
        return self._pieces is not None and self._pieces.failed

    @property
    def _asked(self) -> tuple[tuple[int, ...], Sampling, Recipe | None, str]:
        """Return what the engine is asked for."""
        return self.plan.token_ids, self.sampling, self._prompt.recipe, self._library.identity.namespace

    def pieces(self) -> Generator[Piece]:
        deltas = self._pieces.stream() if self._pieces else self.engine.stream(*self._asked)
        with contextlib.closing(deltas):
            for delta in deltas:
                yield self.feed(delta)

    async def apieces(self) -> AsyncGenerator[Piece]:
        deltas = self._pieces.astream() if self._pieces else self.engine.astream(*self._asked)
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                ends = delta.finish_reason is not None  # may look into the store
                yield await asyncio.to_thread(self.feed, delta) if ends else self.feed(delta)

    def go_on(self, error: BlendragError) -> bool:
        """Have another engine, started if need be, give the rest of an answer that failed like this."""
        if not self._tokens or self._request.offered or not can_go_on(self.sampling):
            return False
        self._resumed[str(error)] = len(self._tokens)
        self._pieces, self.engine = None, self._library.start()
        self._prompt = self._library.prepare(self.plan, self._options)
        return True

    # -- the answer's -------------------------------------------------------------------------------------

    def feed(self, delta: Delta) -> Piece:
        """Return what is certain by now; with the last piece, the rest and the whole."""
        if self._ttft_s is None:
            self._ttft_s = delta.ttft_s
            self.on_first_token(delta.ttft_s)
            if self.speculation == "adopted":
                self._ttft_s = time.perf_counter() - self._begin
        thought, content = self._reader.feed(delta) if self._reader else ("", delta.text)
        self._add(content, thought, token_logprobs(self._library.tokenizer, delta))
        self._tokens += delta.token_ids
        return self._end(delta, thought) if delta.finish_reason else self._certain(thought, self._tools)

    def _end(self, last: Delta, thought: str) -> Piece:
        evidence = self._prompt.evidence(last.report, last.prefix_tokens)
        again = max(self._resumed.values(), default=0)
        evidence = replace(
            evidence, fresh=evidence.fresh + again, speculation=self.speculation, resumed=self._resumed
        )
        request, seconds = self._request, time.perf_counter() - self._begin
        stored = self._library.answered(self.plan, evidence, request.messages, request.conversation, seconds)
        return self._whole(
            read_answer(self._text, request, self._tools, self._tokens, cut=last.finish_reason == "length"),
            evidence,
            tokens=len(self._tokens),
            stored=stored,
            finish_reason=last.finish_reason or "stop",
            model=self._settings.model,
            thought=thought,
        )
