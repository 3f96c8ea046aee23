"""Tool calls that a client of vLLM's server forces."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from openai.types.responses import FunctionTool, ToolChoiceFunction
from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation, FunctionCall, ToolCall
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
)
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.streaming import (
    extract_named_tool_call_streaming,
    extract_required_tool_call_streaming,
)

from blendrag.errors import ConfigError
from blendrag.text import encodable

# Models whose answers are read by parsers of their own, which do not accept calls as JSON.
_APART = frozenset({"cohere_command3", "cohere_command4", "hf", "kimi_k3", "openai"})

Schema = Callable[[Sequence[Mapping[str, Any]], str | None, int | None], Mapping[str, Any]]


def hold_forced_calls(name: str, schema: Schema) -> None:
    """Have the tool parser of this name hold forced calls to JSON by ``schema``, in every route of this
    process, as vLLM does for models that write JSON.

    By default, vLLM holds them to structural tags, which only one of its backends knows, and does not check
    arguments. schema: makes the schema from the tools, the name of a forced tool, and the limit of tokens;
    raises ConfigError for tools whose calls cannot be forced.
    """
    if name in _APART:
        return
    kind = ToolParserManager.get_tool_parser(name)

    class Forcing(kind):  # type: ignore[misc, valid-type]
        structural_tag_model = None
        supports_required_and_named = False  # vLLM's own reading of them fails in streams of many parsers
        _sent = ""
        _named = False

        def adjust_request(self, request: Any) -> Any:
            if not _forced(request):
                return super().adjust_request(request)
            try:
                held = schema(_tools(request), _name(request), _most_tokens(request))
            except ConfigError as error:
                raise VLLMValidationError(str(error), parameter="tools") from error
            request.structured_outputs = StructuredOutputsParams(json=dict(held))
            if isinstance(request, ResponsesRequest):
                request.text = None
            else:
                request.response_format = None
            return request

        def extract_tool_calls(self, model_output: str, request: Any) -> Any:
            if not _forced(request):
                return super().extract_tool_calls(model_output, request)
            try:
                calls = _calls(model_output, _name(request))
            except ValueError:  # the answer was cut off
                return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
            return ExtractedToolCallInformation(tools_called=True, tool_calls=calls, content=None)

        def extract_tool_calls_streaming(
            self, previous: str, current: str, delta: str, *ids: Any, **more: Any
        ) -> Any:
            request = more.get("request", ids[-1] if ids else None)
            if not _forced(request):
                return super().extract_tool_calls_streaming(previous, current, delta, *ids, **more)
            before, self._sent = self._sent, self._sent + delta
            about = {"tool_call_idx": None, "tool_call_id_type": "random"}
            if (name := _name(request)) is None:
                found, _ = extract_required_tool_call_streaming(
                    previous_text=before, current_text=self._sent, **about
                )
                return found
            found, self._named = extract_named_tool_call_streaming(
                delta_text=delta,
                function_name=name,
                function_name_returned=self._named,
                tokenizer=self.model_tokenizer,
                **about,
            )
            return found

    ToolParserManager.register_module(name, force=True, module=Forcing)


def _forced(request: Any) -> bool:
    return request.tool_choice == "required" or _name(request) is not None


def _name(request: Any) -> str | None:
    """Return the name of the tool that the request forces, if it names one."""
    choice = request.tool_choice
    if isinstance(choice, ToolChoiceFunction):
        return choice.name
    return choice.function.name if isinstance(choice, ChatCompletionNamedToolChoiceParam) else None


def _tools(request: Any) -> list[dict[str, Any]]:
    """Return the request's tools in the form of chat completions."""
    if isinstance(request, ResponsesRequest):
        functions = [tool.model_dump() for tool in request.tools if isinstance(tool, FunctionTool)]
        return [{"type": "function", "function": function} for function in functions]
    return [tool.model_dump() for tool in request.tools or ()]


def _most_tokens(request: Any) -> int | None:
    names = ("max_output_tokens", "max_completion_tokens", "max_tokens")
    return next((most for name in names if (most := getattr(request, name, None))), None)


def _calls(text: str, name: str | None) -> list[ToolCall]:
    read = json.loads(text)
    called = [(name, read)] if name is not None else [(one["name"], one["parameters"]) for one in read]
    written = [(each, encodable(json.dumps(arguments, ensure_ascii=False))) for each, arguments in called]
    return [ToolCall(function=FunctionCall(name=each, arguments=one)) for each, one in written]
