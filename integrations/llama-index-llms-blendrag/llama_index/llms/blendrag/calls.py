"""One call of ``BlendLLM``: the request it becomes, and the responses that come of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, LogProb
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.dispatcher import active_instrument_tags  # type: ignore[attr-defined]
from llama_index.core.instrumentation.span import active_span_id

from blendrag.chat.completion import Completion, Piece
from blendrag.chat.request import AUTO, ChatRequest
from blendrag.engine.client.generation import Sampling
from blendrag.errors import ConfigError
from blendrag.options import BlendOptions
from llama_index.llms.blendrag.events import BlendCacheEvent
from llama_index.llms.blendrag.messages import assistant_message, plain_messages
from llama_index.llms.blendrag.nodes import node_texts

if TYPE_CHECKING:
    from llama_index.llms.blendrag.base import BlendLLM

dispatcher = get_dispatcher(__name__)

_TAGS = ("conversation", "session_id")  # of LlamaIndex's instrumentation; the second is what Memory calls it


class Call:
    """``options`` are those of a method call; they override the model's fields. What is none of ours goes to
    vLLM's ``SamplingParams``, which refuses what it does not know. Raises ConfigError for a wrong value."""

    def __init__(self, llm: BlendLLM, messages: Sequence[ChatMessage] | str, options: dict[str, Any]) -> None:
        options = dict(options)
        settings = llm.settings
        self._span_id = active_span_id.get()
        self._parallel = options.pop("allow_parallel_tool_calls", True)
        self._text = ""

        def option(name: str) -> Any:
            given = options.pop(name, None)
            return getattr(llm, name) if given is None else given

        documents = _texts(options.pop("documents", None) or ())
        tools = tuple(options.pop("tools", None) or ())
        choice = options.pop("tool_choice", None) or AUTO
        blending = _blending(settings.blending, option("mode"), option("recompute_ratio"), option("selector"))
        max_retries = option("max_retries")
        conversation = _conversation(options.pop("conversation", None), llm.conversation)
        temperature, stop = option("temperature"), option("stop")
        sampling = Sampling(
            max_tokens=option("max_tokens") or settings.max_tokens,
            temperature=settings.temperature if temperature is None else temperature,
            top_p=option("top_p"),
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            seed=option("seed"),
            logprobs=options.pop("logprobs", None),
            timeout_s=option("timeout"),
            grammar=options.pop("grammar", None),
            other=options,
        )
        self.request = ChatRequest(
            messages if isinstance(messages, str) else plain_messages(messages),
            sampling,
            documents=documents,
            tools=tools,
            tool_choice=choice,
            options=blending,
            max_retries=max_retries,
            conversation=conversation,
        )

    def feed(self, piece: Piece) -> ChatResponse:
        """The response after one more piece: everything so far, and what is new."""
        self._text += piece.text
        if piece.completion is not None:
            return self.end(piece.completion, piece.text)
        return ChatResponse(message=assistant_message(self._text), delta=piece.text)

    def end(self, completion: Completion, delta: str | None = None) -> ChatResponse:
        """The whole response; tells the instrumentation about it."""
        usage, evidence = _usage(completion), _evidence(completion)
        dispatcher.event(
            BlendCacheEvent(model=completion.model, usage=usage, evidence=evidence, span_id=self._span_id)
        )
        calls = completion.tool_calls if self._parallel else completion.tool_calls[:1]
        return ChatResponse(
            message=assistant_message(completion.text, calls),
            delta=delta,
            raw={
                "model": completion.model,
                "finish_reason": completion.finish_reason,
                "usage": usage,
                "blendrag": evidence,
                "invalid_tool_calls": [asdict(call) for call in completion.invalid_tool_calls],
            },
            logprobs=_logprobs(completion) if completion.logprobs else None,
            additional_kwargs={
                **usage,
                "cache_read_tokens": completion.usage.cache_read,
                "cache_creation_tokens": completion.usage.cache_creation,
                "recomputed_tokens": completion.usage.recomputed,
            },
        )


def _blending(options: BlendOptions, mode: str, ratio: float | None, selector: str | None) -> BlendOptions:
    """``options`` with what may differ from request to request."""
    if mode not in ("blend", "off"):
        raise ConfigError(f"mode {mode!r}: there are 'blend' and 'off'")
    wanted = {"recompute_ratio": ratio, "selector": selector}
    given = {name: to for name, to in wanted.items() if to is not None}
    return replace(options, blend=mode == "blend", **given)  # type: ignore[arg-type]


def _conversation(given: Any, default: str | None) -> str | None:
    """The call's; else that of the ``instrument_tags`` around it, since engines and agents hand on no
    options; else the LLM's own."""
    tags = active_instrument_tags.get()
    named = [given, *(tags.get(name) for name in _TAGS), default]
    return next((str(one) for one in named if one is not None), None)


def _texts(documents: Iterable[Any]) -> tuple[str, ...]:
    """Texts of documents, which may be given as text, as nodes, or as nodes with a score."""
    return tuple(
        text
        for one in documents
        for text in ([one] if isinstance(one, str) else node_texts(getattr(one, "node", one), False))
    )


def _usage(completion: Completion) -> dict[str, int]:
    usage = completion.usage
    return {"prompt_tokens": usage.input, "completion_tokens": usage.output, "total_tokens": usage.total}


def _evidence(completion: Completion) -> dict[str, Any]:
    evidence = asdict(completion.evidence)
    evidence["documents"] = [row for row in evidence["documents"] if row["kind"] != "fresh"]
    return {**evidence, "ttft_s": completion.ttft_s, "total_s": completion.total_s}


def _logprobs(completion: Completion) -> list[list[LogProb]]:
    return [
        [LogProb(token=text, logprob=logprob, bytes=list(text.encode())) for text, logprob in one.top]
        for one in completion.logprobs
    ]
