"""The prompts that vLLM's server makes of requests to its routes, before it renders them."""

from __future__ import annotations

from typing import Any, get_args


async def chat_of_messages(handler: Any, request: Any) -> Any:
    """Return the chat completion that a request of Anthropic's is to vLLM. handler: of ``/v1/messages``."""
    effort = "none"
    if request.thinking is not None and request.thinking.type == "disabled":
        effort = await handler._get_disabled_thinking_effort()
    return handler.to_chat_completion_request(
        request, merge_inline_system=handler._merge_inline_system, disabled_thinking_effort=effort
    )


class ResponsePrompt:
    """The prompt of a request to ``/v1/responses``, with the conversation that it goes on from. handler: of
    that route. Raises LookupError for a response that is not stored."""

    def __init__(self, handler: Any, request: Any) -> None:
        self._renderer, self._request = handler.online_renderer, request
        self.tool_server = handler.tool_server
        self._before: list[Any] | None = None
        self._outputs: list[Any] | None = None
        if (id := request.previous_response_id) is not None:
            self._outputs = list(handler.response_store[id].output)
            self._before = list(handler.msg_store.get(id) or ()) or None

    @property
    def takes_ids(self) -> bool:
        """Return whether vLLM takes token ids in place of this prompt; it does not for gpt-oss, whose
        prompts it writes itself."""
        return not self._renderer.use_harmony

    def messages(self) -> list[Any]:
        """Return it as messages of a chat."""
        from vllm.entrypoints.openai.responses.utils import construct_input_messages

        return list(
            construct_input_messages(
                request_instructions=self._request.instructions,
                request_input=self._request.input,
                prev_msg=self._before,
                prev_response_output=self._outputs,
            )
        )

    async def token_ids(self) -> list[int]:
        """Return its token ids. Raises what vLLM does if it refuses the request, or ValueError."""
        rendered = await self._renderer.render_responses(
            self._request.model_copy(deep=True),
            previous_messages=self._before,
            previous_response_outputs=self._outputs,
            skip_mm_cache=True,
        )
        if (error := getattr(rendered, "error", None)) is not None:
            raise ValueError(error.message)
        return list(rendered.engine_input["prompt_token_ids"])


def message_parts() -> frozenset[str]:
    """Return the kinds of parts in a message to ``/v1/messages`` that vLLM's server knows."""
    from vllm.entrypoints.anthropic.protocol import AnthropicContentBlock

    return frozenset(get_args(AnthropicContentBlock.model_fields["type"].annotation))


INPUT_ITEMS = frozenset(
    {"custom_tool_call", "custom_tool_call_output", "function_call", "function_call_output", "reasoning"}
)
"""The kinds of items, beside messages, that vLLM's server makes prompts of in ``/v1/responses``: its class of
requests has many more."""

INPUT_PARTS = frozenset({"input_image", "input_text"})
"""The kinds of parts in what users and tools say there; of files it makes nothing."""
