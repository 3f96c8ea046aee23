"""One request on its way: how it is put to the engine, and what becomes of the engine's pieces."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import replace

from blendrag.chat.answer import Answer, Piece, TokenLogprob, Usage, token_logprobs
from blendrag.chat.calls import ended_by, read_answer, visible
from blendrag.chat.messages import fit_template
from blendrag.chat.request import ChatRequest
from blendrag.chat.tools import TemplateFacts, answer_grammar, whole_tool, with_tools
from blendrag.engine.client.continuation import can_go_on
from blendrag.engine.client.generation import Delta, Sampling
from blendrag.engine.client.pieces import Pieces
from blendrag.engine.client.reasoning import Reasoning
from blendrag.engine.client.tool_parser import ToolParser
from blendrag.errors import BlendragError, EngineError
from blendrag.prompt import PromptPlan
from blendrag.serving.evidence import Speculated, evidence_of
from blendrag.serving.library import Library
from blendrag.settings import Settings


def plan_request(library: Library, request: ChatRequest) -> PromptPlan:
    """Return the prompt that a request becomes. Raises ModelError if the model's template takes no form of
    it."""
    if request.plan is not None:
        return request.plan
    if isinstance(request.messages, str):
        return library.plan(request.messages, request.documents)
    messages, options = with_tools(TemplateFacts.of(library.tokenizer), request)
    options |= request.chat_template_kwargs
    fitted = fit_template(library.tokenizer, messages, **options)
    return library.plan(fitted, request.documents, **options)


class Turn:
    """One request's turn on the engine: fed with the engine's pieces, it gives those of the answer."""

    def __init__(self, library: Library, settings: Settings, request: ChatRequest) -> None:
        self._library, self._settings = library, settings
        self.engine = library.start()
        self.plan = plan_request(library, request)
        self._request = request.within(self.engine.max_model_len - len(self.plan.token_ids))
        self._choose()
        self.namespace = library.identity.namespace
        self._begin = time.perf_counter()
        self._tools = self._tool_parser()
        self._skip_special_tokens: bool = request.sampling.other.get("skip_special_tokens", True)
        if self._tools:
            self._skip_special_tokens &= self._tools.skip_special_tokens
        self._reader = Reasoning.of(
            settings.reasoning_parser,
            library.tokenizer,
            self.plan.token_ids,
            request.chat_template_kwargs,
            skip_special_tokens=self._skip_special_tokens,
        )
        if self._reader:
            self._skip_special_tokens = self._reader.skip_special_tokens
        if self._tools:
            self._tools.read_behind(self._reader)
        self._reasoning, self._text, self._shown = "", "", 0
        self._tokens: list[int] = []
        self._resumed: dict[str, int] = {}
        self._logprobs: list[TokenLogprob] = []
        self._pieces: Pieces | None = None
        self._first_s: float | None = None
        self.speculation: Speculated = "none"
        self.on_first_token: Callable[[float], None] = lambda ttft_s: None
        """Called with the engine's TTFT, in seconds."""

    def _tool_parser(self) -> ToolParser | None:
        """Return what reads calls that the model may make; calls held by a grammar are JSON."""
        request = self._request
        if not request.offered or request.held:
            return None
        tools = [whole_tool(tool) for tool in request.offered]
        wanted, variables = self._settings.tool_parser, request.chat_template_kwargs
        return ToolParser.of(wanted, self._library.tokenizer, tools, variables)

    def _choose(self) -> None:
        """Choose how the prompt is prefilled."""
        options = self._request.options or self._settings.blending
        self._budget = options.kv_budget
        recipe, self._plain = self._library.recipe(self.plan, options)
        self._path, self.recipe = self._library.path(self.plan, recipe)

    @property
    def sampling(self) -> Sampling:
        """The request's sampling, held to the schema or the call that is asked for, once the model has
        thought."""
        request, grammar = self._request, answer_grammar(self._request)
        given = tuple(self._tokens)
        sampling = replace(request.sampling, path=self._path, given=given, grammar=grammar)
        if self._reader and sampling.grammar and self._reader.comes_first:
            sampling = replace(sampling, thinks_first=request.chat_template_kwargs)
        if self._reader or self._tools:
            special = {"skip_special_tokens": self._skip_special_tokens}
            sampling = replace(sampling, other={**sampling.other, **special})
        return sampling

    # -- the engine's pieces ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to generate, whoever reads it."""
        self._pieces = self.engine.begin(self.plan.token_ids, self.sampling, self.recipe, self.namespace)

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

    def deltas(self) -> Generator[Delta]:
        """Yield the engine's pieces. Closing the iterator stops the generation."""
        if self._pieces is not None:
            return self._pieces.stream()
        return self.engine.stream(self.plan.token_ids, self.sampling, self.recipe, self.namespace)

    def adeltas(self) -> AsyncGenerator[Delta]:
        """Do as ``deltas`` in any event loop."""
        if self._pieces is not None:
            return self._pieces.astream()
        return self.engine.astream(self.plan.token_ids, self.sampling, self.recipe, self.namespace)

    def go_on(self, error: EngineError) -> bool:
        """Have another engine, started if need be, give the rest of an answer that failed like this. Returns
        False if nothing was given out, or the rest would not be right."""
        if not self._tokens or self._request.offered or not can_go_on(self.sampling):
            return False
        self._resumed[str(error)] = len(self._tokens)
        self._pieces, self.engine = None, self._library.start()
        self._choose()
        return True

    # -- the answer's -------------------------------------------------------------------------------------

    def feed(self, delta: Delta) -> Piece:
        """Return the part of the answer that is certain by now; with the last piece, the rest and the
        whole."""
        if self._first_s is None:
            self._first_s = delta.ttft_s
            self.on_first_token(delta.ttft_s)
            if self.speculation == "adopted":
                self._first_s = time.perf_counter() - self._begin
        thought, said = self._reader.feed(delta) if self._reader else ("", delta.text)
        self._reasoning += thought
        self._text += said
        self._tokens += delta.token_ids
        self._logprobs += token_logprobs(self._library.tokenizer, delta)
        if delta.finish_reason is not None:
            return self._end(delta, thought)
        shown = visible(self._text, self._request, self._tools)
        piece, self._shown = shown[self._shown :], max(self._shown, len(shown))
        return Piece(piece, reasoning=thought)

    def _end(self, last: Delta, thought: str) -> Piece:
        evidence = evidence_of(self.plan, self.recipe, self._plain, last, self._path, self._budget)
        again = max(self._resumed.values(), default=0)
        evidence = replace(
            evidence, fresh=evidence.fresh + again, speculation=self.speculation, resumed=self._resumed
        )
        stored = 0
        with contextlib.suppress(BlendragError):  # the answer is given, whatever becomes of the KV
            stored = self._library.repair(evidence.missing) if evidence.missing else 0
        if forecaster := self._library.forecaster:
            request, seconds = self._request, time.perf_counter() - self._begin
            forecaster.answered(request.messages, self.plan, request.conversation, seconds)
        read = read_answer(self._text, self._request, self._tools, self._tokens)
        usage = Usage(
            input=evidence.prompt,
            output=len(self._tokens),
            cache_read=evidence.reused + evidence.prefix,
            cache_creation=stored,
            recomputed=evidence.recomputed,
        )
        answer = Answer(
            read.text,
            self._reasoning or None,
            sources=self._request.sources,
            finish_reason=ended_by(read, last.finish_reason or "stop"),
            ttft_s=self._first_s or 0.0,
            total_s=time.perf_counter() - self._begin,
            usage=usage,
            evidence=evidence,
            tool_calls=read.calls,
            invalid_tool_calls=read.invalid,
            logprobs=tuple(self._logprobs),
            model=self._settings.model,
        )
        return Piece(read.text[self._shown :], answer, thought)
