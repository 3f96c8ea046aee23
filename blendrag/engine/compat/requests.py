"""Requests to an engine, and the reading of its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from vllm import SamplingParams, exceptions
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

from blendrag.engine.compat.platform import is_cpu

try:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as SlotLogitsProcessor
except ModuleNotFoundError:  # before 0.31 the second model runner takes none: with one, the first is chosen
    LogitsContext, SlotLogitsProcessor = Any, object

VLLMClientError = getattr(exceptions, "VLLMClientError", ValueError)  # before 0.27 they are ValueErrors

# vLLM's own names that other packages import from here.
__all__ = [
    "BatchUpdate", "LogitsContext", "LogitsProcessor", "RequestOutputKind", "SamplingParams",
    "SlotLogitsProcessor", "StructuredOutputsParams", "process_dict_updates",
]  # fmt: skip


def check_readable(params: SamplingParams) -> None:
    """Raise ValueError for parameters that the engine's process cannot read: it would answer nobody again."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    except (msgspec.MsgspecError, OverflowError) as error:
        raise ValueError(str(error)) from error


async def answers_of_all(llm: Any, method: str, args: tuple[Any, ...]) -> list[Any]:
    """Return the answers of an ``AsyncLLM``'s workers: every rank of every data parallel engine, in their
    order."""
    core = llm.engine_core
    if len(getattr(core, "core_engines", ())) < 2:
        return list(await llm.collective_rpc(method, args=args))
    engines = await core.call_utility_all_async("collective_rpc", method, None, args, None)
    return [answer for ranks in engines for answer in ranks]


def has_unfinished(llm: Any) -> bool:
    """Return whether an ``AsyncLLM`` is answering anything."""
    return bool(llm.output_processor.has_unfinished_requests())


async def end_answers(llm: Any) -> None:
    """Have an ``AsyncLLM`` end all its requests, with the part of each answer that there is."""
    await llm.abort(list(llm.output_processor.request_states), internal=True)


def window_of(llm: Any) -> int:
    """Return how many tokens a prompt and its answer have in an ``AsyncLLM``, at most."""
    return int(llm.model_config.max_model_len)


def tokenizer_of(llm: Any) -> Any:
    """Return the tokenizer that an ``AsyncLLM`` decodes its answers with."""
    return llm.output_processor.tokenizer


def reasoning_parsers() -> list[str]:
    """Return the names of vLLM's reasoning parsers."""
    from vllm.reasoning import ReasoningParserManager

    return list(ReasoningParserManager.list_registered())


def reasoning_parser(name: str, tokenizer: Any, chat_template_kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return a vLLM ``Parser`` for one answer, and the request that its methods take, which says what it
    needs of the detokenizer. Raises the parser's own error for a tokenizer without its tokens."""
    harmony = name == "openai_gptoss"
    return _parser(tokenizer, (), chat_template_kwargs, reasoning_parser_name=name, is_harmony=harmony)


def tool_parsers() -> list[str]:
    """Return the names of vLLM's tool parsers."""
    from vllm.tool_parsers import ToolParserManager

    return list(ToolParserManager.list_registered())


def tool_parser(
    name: str, tokenizer: Any, tools: Sequence[Mapping[str, Any]], chat_template_kwargs: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Do as :func:`reasoning_parser`, for calls of these tools, as OpenAI describes them."""
    named = {"tool_parser_name": name, "enable_auto_tools": True, "is_harmony": name == "openai"}
    return _parser(tokenizer, tools, chat_template_kwargs, **named)


def _parser(
    tokenizer: Any, tools: Sequence[Mapping[str, Any]], chat_template_kwargs: Mapping[str, Any], **named: Any
) -> tuple[Any, Any]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager

    kind = ParserManager.get_parser(**named)
    assert kind is not None, "the name is none of the registered ones"
    offered = {"tools": [dict(tool) for tool in tools], "tool_choice": "auto"} if tools else {}
    request = ChatCompletionRequest(messages=[], **offered)
    variables = dict(chat_template_kwargs)
    parser = kind(_with_vocabulary(tokenizer), request.tools, chat_template_kwargs=variables)
    return parser, parser.adjust_request(request)


@lru_cache(maxsize=1)
def _with_vocabulary(tokenizer: Any) -> Any:
    """Return the tokenizer with its vocabulary at hand, which every parser asks for and transformers builds
    anew each time."""
    from vllm.tokenizers.hf import get_cached_tokenizer

    return get_cached_tokenizer(tokenizer)


def detokenizer(tokenizer: Any, prompt: list[int], skip_special_tokens: bool) -> Callable[[int], str]:
    """Return a function that gives the text that each token adds to an answer, as the engine does. It has to
    be called with the tokens in their order."""
    params = SamplingParams(skip_special_tokens=skip_special_tokens)
    return incremental_detokenizer(tokenizer, prompt, params).decode_next


def incremental_detokenizer(tokenizer: Any, prompt: list[int], params: SamplingParams) -> Any:
    """Return vLLM's ``IncrementalDetokenizer`` of an answer, which finds its stop strings."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    request = SimpleNamespace(
        request_id="", prompt_token_ids=prompt, prompt_embeds=None, sampling_params=params
    )
    return IncrementalDetokenizer.from_new_request(tokenizer, request)


def has_other_than_text(messages: Any) -> bool:
    """Return whether vLLM's server sees images and the like in a chat's messages. If so, it ignores the
    prompt's token ids."""
    from vllm.renderers.chat_utils import has_non_text_content

    return bool(has_non_text_content(messages))


def content_parts() -> tuple[frozenset[str], frozenset[str]]:
    """Return the kinds of parts in a message that vLLM's server takes, and the keys by which it takes a part
    of any kind for an image and the like."""
    try:  # from 0.33
        from vllm.renderers.chat_utils.chat_message import MM_PARSER_MAP, TEXT_PART_TYPES
    except ImportError:
        from vllm.renderers.chat_utils import MM_PARSER_MAP, TEXT_PART_TYPES

    known = frozenset(MM_PARSER_MAP)
    # Texts of responses it would read, but its class of requests refuses them.
    return known - {"input_text", "output_text"}, known - {"tool_reference", *TEXT_PART_TYPES}


def output_ids_not_read(runner: Any) -> None:
    """Tell vLLM's first model runner that logits processors do not read output ids: they only count them. It
    cannot know, and would make every step of asynchronous scheduling wait for the last step's ids."""
    if hasattr(runner, "input_batch"):  # the second one does not keep the ids on the host
        runner.input_batch.logitsprocs_need_output_token_ids = False


def discard_without_seeds(runner: Any) -> None:
    """Have vLLM's first model runner on a CPU sample what it discards, behind a part of a prompt, without the
    generator of a request's seed: it would turn that back next, which those of CPUs cannot do, and end the
    engine. The second one does without generators."""
    if not (is_cpu() and hasattr(runner, "discard_request_mask")):
        return
    sample = runner.sample_tokens

    def sample_tokens(*args: Any) -> Any:
        generators: dict[int, Any] = runner.input_batch.generators
        parts = np.flatnonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])
        discarded = {int(row): generators.pop(row) for row in parts if row in generators}
        try:
            return sample(*args)
        finally:
            generators |= discarded

    runner.sample_tokens = sample_tokens
