"""The doors of a server: the routes of vLLM's that answer prompts, by what planning has to know of their
requests, and by where their answers count tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from blendrag.errors import ConfigError
from blendrag.prompt import Messages
from blendrag.server import parts

_NOT_PLANNED = ("echo", "prompt_logprobs", "truncate_prompt_tokens", "prompt_embeds", "suffix")
_CALLED = frozenset({"function", "custom", "namespace"})  # kinds of tools that clients run

Render = Callable[[], Awaitable[list[int]]]


@dataclass(frozen=True, slots=True)
class Asked:
    """The facts of a request that planning has to know.

    sent: what the client has sent, as messages or text. most: tokens of an answer. plain: why it goes to
    vLLM as it is. render: gives the token ids that vLLM makes of it, and raises what vLLM does if it refuses
    it.
    """

    sent: Messages | str
    most: int | None
    plain: str | None
    render: Render

    def parts(self) -> Iterator[dict[str, Any]]:
        """Yield the parts of the messages' contents, where they are not plain texts."""
        for message in () if isinstance(self.sent, str) else self.sent:
            if isinstance(content := message.get("content"), list):
                yield from (part for part in content if isinstance(part, dict))


class Door(ABC):
    """A route that answers prompts.

    operation: its name by OpenTelemetry's conventions. takes: the name of vLLM's class of its requests.
    holds: the field of a body that holds the prompt. own: one that no other door's bodies have. stored:
    fields that name what vLLM stores for all tenants. details: the part of an answer's usage that says how
    many tokens of the prompt were cached. counting: what stands in the event of a stream that counts tokens.
    tells: whether that event says the evidence, too, since no other one would be understood. ahead: events
    that come before anything is computed.
    """

    operation: ClassVar[str] = "chat"
    path: ClassVar[str]
    takes: ClassVar[str]
    holds: ClassVar[str] = "messages"
    own: ClassVar[str | None] = None
    stored: ClassVar[tuple[str, ...]] = ()
    details: ClassVar[str] = "prompt_tokens_details"
    counting: ClassVar[str] = '"usage"'
    ahead: ClassVar[int] = 0
    tells: ClassVar[bool] = False

    def readable(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a body whose parts are of kinds that vLLM knows. Raises ConfigError if nothing is left."""
        items = body.get(self.holds)
        return {**body, self.holds: self._readable(items)} if isinstance(items, list) else body

    def _readable(self, items: list[Any]) -> list[Any]:
        return items

    @abstractmethod
    async def asked(self, request: Any, state: Any) -> Asked:
        """Return what a request asks. state: that of vLLM's app. Raises what vLLM does if it refuses it."""

    def put(self, request: Any, ids: list[int], params: dict[str, Any]) -> None:
        """Have vLLM take these token ids for the request's prompt."""
        request.kv_transfer_params = {**params, "prompt_token_ids": ids}

    def keep_apart(self, request: Any, namespace: str) -> None:
        """Have what vLLM stores of the request be found in its tenant's namespace only."""
        for name in self.stored if namespace else ():
            value, ours = getattr(request, name), f"{namespace}~"  # no namespace has a tilde
            if value is not None and not value.startswith(ours):
                setattr(request, name, ours + value)

    def answer_in(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """Return the part of a stream's event that counts tokens, if it does so for the whole answer."""
        return event if event.get("usage") and not event.get("choices") else None

    def cached(self, answer: dict[str, Any]) -> int | None:
        """Return how many prompt tokens vLLM says that it has not computed."""
        return ((answer.get("usage") or {}).get(self.details) or {}).get("cached_tokens")

    def count(self, answer: dict[str, Any], cached: int) -> None:
        """Have an answer say that so many tokens of its prompt were not computed."""
        if usage := answer.get("usage"):
            usage[self.details] = {**(usage.get(self.details) or {}), "cached_tokens": cached}


class Completions(Door):
    operation = "text_completion"
    path = "/v1/completions"
    takes = "CompletionRequest"
    holds = "prompt"

    async def asked(self, request: Any, state: Any) -> Asked:
        match request.prompt:
            case [str(alone)]:
                request.prompt = alone
        plain = _of_sampling(request)
        if plain is None and not isinstance(request.prompt, str):
            plain = "prompts of token ids, and several at once, are prefilled plainly"

        async def render() -> list[int]:
            copy = request.model_copy(deep=True)
            return _ids(await state.online_renderer.render_completion(copy, skip_mm_cache=True))

        return Asked(str(request.prompt), request.max_tokens, plain, render)

    def put(self, request: Any, ids: list[int], params: dict[str, Any]) -> None:
        request.prompt, request.kv_transfer_params = ids, params or None


class ChatCompletions(Door):
    path = "/v1/chat/completions"
    takes = "ChatCompletionRequest"

    def _readable(self, items: list[Any]) -> list[Any]:
        from blendrag.engine.compat.requests import content_parts

        known, media = content_parts()
        return [parts.readable(one, known, media) for one in items]

    async def asked(self, request: Any, state: Any) -> Asked:
        plain = _of_sampling(request) or _of_messages(request.messages)
        most = request.max_completion_tokens or request.max_tokens

        async def render() -> list[int]:
            copy = request.model_copy(deep=True)
            rendered = await state.online_renderer.render_chat(copy, skip_mm_cache=True)
            return _ids(rendered[1] if isinstance(rendered, tuple) else rendered)

        return Asked(_dicts(request.messages), most, plain, render)


class AnthropicMessages(ChatCompletions):
    """vLLM makes a chat completion of each request."""

    path = "/v1/messages"
    takes = "AnthropicMessagesRequest"
    own = "system"
    counting = "event: message_delta"
    tells = True

    def _readable(self, items: list[Any]) -> list[Any]:
        from blendrag.engine.compat.routes import message_parts

        known = message_parts()
        return [parts.readable(one, known) for one in items]

    async def asked(self, request: Any, state: Any) -> Asked:
        from blendrag.engine.compat.routes import chat_of_messages

        return await super().asked(await chat_of_messages(state.anthropic_serving_messages, request), state)

    def answer_in(self, event: dict[str, Any]) -> dict[str, Any] | None:
        return event if event.get("type") == "message_delta" else None

    def cached(self, answer: dict[str, Any]) -> int | None:
        return (answer.get("usage") or {}).get("cache_read_input_tokens")

    def count(self, answer: dict[str, Any], cached: int) -> None:
        if usage := answer.get("usage"):  # whose input tokens are those that were not in a cache
            before = usage.get("cache_read_input_tokens") or 0
            usage["input_tokens"] += before - cached
            usage["cache_read_input_tokens"] = cached


class Responses(Door):
    path = "/v1/responses"
    takes = "ResponsesRequest"
    holds = "input"
    stored = ("request_id", "previous_response_id")
    details = "input_tokens_details"
    counting = "event: response.completed"
    ahead = 2  # it is created, and in progress
    tells = True

    def readable(self, body: dict[str, Any]) -> dict[str, Any]:
        return super().readable({name: value for name, value in body.items() if value is not None})

    def _readable(self, items: list[Any]) -> list[Any]:
        from blendrag.engine.compat.requests import content_parts
        from blendrag.engine.compat.routes import INPUT_ITEMS, INPUT_PARTS

        _, media = content_parts()
        read = (parts.readable_item(one, INPUT_ITEMS, INPUT_PARTS, media) for one in items)
        left = [one for one in read if one is not None]
        if items and not left:
            raise ConfigError("input has no item with text that the model could read: give a message")
        return left

    async def asked(self, request: Any, state: Any) -> Asked:
        from blendrag.engine.compat.routes import ResponsePrompt

        prompt = ResponsePrompt(state.openai_serving_responses, request)
        messages = prompt.messages()
        plain = _of_messages(messages)
        if not prompt.takes_ids:
            plain = "responses of gpt-oss are prefilled plainly: chat completions are blended"
        elif prompt.tool_server and any(tool.type not in _CALLED for tool in request.tools):
            plain = "prompts whose tools the server runs are prefilled plainly"
        elif request.truncation == "auto":
            plain = "prompts with truncation are prefilled plainly"
        return Asked(_dicts(messages), request.max_output_tokens, plain, prompt.token_ids)

    def answer_in(self, event: dict[str, Any]) -> dict[str, Any] | None:
        completed: dict[str, Any] | None = event.get("response")
        return completed if event.get("type") == "response.completed" else None


DOORS: tuple[Door, ...] = (ChatCompletions(), Completions(), Responses(), AnthropicMessages())


def door_of(kind: type) -> Door:
    """Return the door that takes requests of this class, which is vLLM's or made of it. Fields tell nothing:
    any request may have some that mean nothing."""
    names = {base.__name__ for base in kind.__mro__}
    return next(door for door in DOORS if door.takes in names)


def _of_sampling(request: Any) -> str | None:
    """Say why a completion goes to vLLM as it is, whatever its prompt."""
    if (request.n or 1) != 1 or getattr(request, "use_beam_search", False):
        return "several answers to a prompt are prefilled plainly"
    for name in _NOT_PLANNED:
        value = getattr(request, name, None)
        if value is not None and value is not False:
            return f"prompts with {name} are prefilled plainly"
    return None


def _of_messages(messages: Any) -> str | None:
    from blendrag.engine.compat.requests import has_other_than_text

    return "prompts with other than text are prefilled plainly" if has_other_than_text(messages) else None


def _dicts(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages before vLLM's route or ours changes them."""
    return [message for message in messages if isinstance(message, dict)]


def _ids(prompts: Any) -> list[int]:
    if not isinstance(prompts, list):  # an ErrorResponse
        raise ValueError(prompts.error.message)
    return list(prompts[0]["prompt_token_ids"])
