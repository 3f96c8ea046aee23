"""One call of ``BlendLLM``: the request it becomes, and the responses that come of it."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, LogProb, ToolCallBlock
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.dispatcher import active_instrument_tags  # type: ignore[attr-defined]
from llama_index.core.instrumentation.span import active_span_id
from llama_index.core.schema import BaseNode, NodeWithScore

from blendrag import foreign
from blendrag.errors import BlendragWarning, ConfigError
from llama_index.llms.blendrag.errors import AnswerCutError
from llama_index.llms.blendrag.events import BlendCacheEvent
from llama_index.llms.blendrag.messages import assistant_message, message_blocks, plain_messages
from llama_index.llms.blendrag.nodes import node_texts

if TYPE_CHECKING:
    from blendrag import Answer, ChatModel, Piece

dispatcher = get_dispatcher(__name__)

STRUCTURED = "structured"
"""Option of a call whose answer LlamaIndex parses, with what it takes for a beginning too: one that is not
whole is an error. A list gets the answer."""
OFFERED_ONLY = "offered_only"
"""Option of a call whose response has no calls of tools that there are not."""
COUNTS = ("best_of", "n")
"""Options of how many answers are wanted. LlamaIndex's responses have one."""
_JSON = re.compile(r"\s*(\{|\[\s*(\{|$))")  # the beginning of a call, and not of "[1] says so"
_TAGS = ("conversation", "session_id")  # of LlamaIndex's instrumentation; the second is what Memory calls it


class Call:
    """A call of ``BlendLLM``. ``options``: the LLM's fields, and last what the method's call puts in their
    place, as :func:`call_options` takes them. ``conversation``: the LLM's own. Raises ConfigError for a wrong
    value, and for a model that this is not."""

    def __init__(
        self,
        chat: ChatModel,
        messages: Sequence[ChatMessage] | str,
        options: Sequence[Mapping[str, Any]],
        conversation: str | None,
    ) -> None:
        given = foreign.call_options(*options, also=("model", STRUCTURED, OFFERED_ONLY, *COUNTS))
        self._span_id = active_span_id.get()
        self._structured = given.get(STRUCTURED)
        self._offered_only = bool(given.get(OFFERED_ONLY))
        self._reasoning = self._text = ""
        if (model := given.get("model")) and model != chat.model_name:
            raise ConfigError(f"this BlendLLM runs {chat.model_name!r}, not {model!r}: make another one")
        for name in COUNTS:
            if given.get(name, 1) != 1:
                warnings.warn(f"{name}={given[name]!r}: one answer is given", BlendragWarning, stacklevel=4)
        asked = foreign.request_options(given)
        asked["documents"] = _texts(asked.get("documents") or ())
        asked["conversation"] = _conversation(asked.get("conversation"), conversation)
        self.request = chat.request(
            messages if isinstance(messages, str) else plain_messages(messages), **asked
        )

    def feed(self, piece: Piece) -> ChatResponse:
        """Return the response after one more piece: everything so far, and what is new."""
        self._reasoning += piece.reasoning
        self._text += piece.text
        if piece.answer is not None:
            return self.end(piece.answer, piece.text, piece.reasoning)
        blocks = message_blocks(self._reasoning, self._text)
        return ChatResponse(
            message=ChatMessage(blocks=blocks, role="assistant"),
            delta=piece.text,
            additional_kwargs=_thinking(piece.reasoning),
        )

    def end(self, answer: Answer, delta: str | None = None, thought: str = "") -> ChatResponse:
        """Return the whole response, and tell the instrumentation of it. thought: what is new of the
        thinking."""
        usage = {
            "prompt_tokens": answer.usage.input,
            "completion_tokens": answer.usage.output,
            "total_tokens": answer.usage.total,
        }
        facts = answer.facts()
        dispatcher.event(
            BlendCacheEvent(model=answer.model, usage=usage, evidence=facts, span_id=self._span_id)
        )
        if self._structured is not None and not self._is_whole(answer):
            raise AnswerCutError(_joined(answer.text, (call.text for call in answer.invalid_tool_calls)))
        if isinstance(self._structured, list):
            self._structured.append(answer)
        return ChatResponse(
            message=assistant_message(answer, unknown=not self._offered_only),
            delta=delta,
            raw={
                "model": answer.model,
                "finish_reason": answer.finish_reason,
                "usage": usage,
                "blendrag": facts,
                "invalid_tool_calls": [asdict(call) for call in answer.invalid_tool_calls],
            },
            logprobs=_logprobs(answer) if answer.logprobs else None,
            additional_kwargs={
                **usage,
                **_thinking(thought),
                "cache_read_tokens": answer.usage.cache_read,
                "cache_creation_tokens": answer.usage.cache_creation,
                "recomputed_tokens": answer.usage.recomputed,
            },
        )

    def _is_whole(self, answer: Answer) -> bool:
        if self.request.offered:
            return bool(answer.tool_calls) and not answer.invalid_tool_calls
        try:
            json.loads(answer.text)
        except (ValueError, RecursionError):
            return False
        return True


def refuse_cut_call(response: ChatResponse) -> None:
    """Raise AnswerCutError if ``max_tokens`` ended the response, or its beginning, within a tool call, or if
    it is nothing but calls that cannot be read."""
    raw = response.raw if isinstance(response.raw, Mapping) else {}
    text = response.message.content or ""
    invalid = raw.get("invalid_tool_calls") or ()
    written = _joined(text, (call["text"] for call in invalid))
    if raw.get("finish_reason") == "length" and (invalid or _JSON.match(text)):
        raise AnswerCutError(written)
    called = any(isinstance(block, ToolCallBlock) for block in response.message.blocks)
    unread = [call["reason"] for call in invalid if not call["call"]]  # the others name no tool
    if unread and not called and not text.strip():
        raise AnswerCutError(written, "; ".join(dict.fromkeys(unread)))


def _joined(text: str, calls: Iterable[str]) -> str:
    return "\n".join(filter(None, [text, *calls]))


def _thinking(thought: str) -> dict[str, str]:
    """Return what is new of the thinking, where LlamaIndex's agents look for it."""
    return {"thinking_delta": thought} if thought else {}


def _conversation(given: Any, default: str | None) -> str | None:
    """Return the call's conversation; else that of the ``instrument_tags`` around it, since engines and
    agents hand on no options; else the LLM's own."""
    tags = active_instrument_tags.get()
    named = [given, *(tags.get(name) for name in _TAGS), default]
    return next((one for one in named if one is not None), None)


def _texts(documents: Any) -> tuple[str, ...]:
    """Return the texts of documents, which may be given as text, as nodes, or as nodes with a score. Raises
    ConfigError for anything else."""
    alone = isinstance(documents, str | BaseNode | NodeWithScore) or not isinstance(documents, Iterable)
    texts: list[str] = []
    for one in [documents] if alone else documents:
        node = one.node if isinstance(one, NodeWithScore) else one
        if not isinstance(node, str | BaseNode):
            raise ConfigError(f"documents has to be texts or nodes, not {one!r}")
        texts += [node] if isinstance(node, str) else node_texts(node, False)
    return tuple(texts)


def _logprobs(answer: Answer) -> list[list[LogProb]]:
    return [
        [LogProb(token=text, logprob=logprob, bytes=list(text.encode())) for text, logprob in one.top]
        for one in answer.logprobs
    ]
