"""Structured output: LlamaIndex shows the schema to the model, the engine holds it to it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterable, Generator, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from llama_index.core.bridge.pydantic import BaseModel, ValidationError
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import PydanticProgramMode

from blendrag import foreign
from llama_index.llms.blendrag.calls import STRUCTURED

if TYPE_CHECKING:
    from blendrag import Answer


class StructuredByGrammar(FunctionCallingLLM):
    """An LLM whose structured answers match a pydantic class, ``as_structured_llm`` included: no other text
    can be generated.

    Open strings of the schema share ``max_tokens``. An answer that is cut all the same raises AnswerCutError,
    with which a stream of beginnings ends, too.
    """

    pydantic_program_mode: PydanticProgramMode = PydanticProgramMode.LLM

    def structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        return super().structured_predict(*self._held(output_cls, prompt, llm_kwargs), **prompt_args)

    async def astructured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        return await super().astructured_predict(*self._held(output_cls, prompt, llm_kwargs), **prompt_args)

    def stream_structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        held = self._held(output_cls, prompt, llm_kwargs)
        objects = super().stream_structured_predict(*held, **prompt_args)
        return _to_the_end(objects, output_cls, held[-1][STRUCTURED])

    async def astream_structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        held = self._held(output_cls, prompt, llm_kwargs)
        objects = await super().astream_structured_predict(*held, **prompt_args)
        return _ato_the_end(objects, output_cls, held[-1][STRUCTURED])

    def _held(
        self, output_cls: type[BaseModel], prompt: BasePromptTemplate, options: dict[str, Any] | None
    ) -> tuple[type[BaseModel], BasePromptTemplate, dict[str, Any]]:
        """Return what these methods take: a copy of the prompt, since LlamaIndex leaves the schema's parser
        in it, which then shows the schema for ever, and options that hold the answer to the class."""
        options = {**(options or {}), STRUCTURED: []}
        if self.pydantic_program_mode is PydanticProgramMode.LLM:  # the other modes call a tool
            options["grammar"] = foreign.class_schema(output_cls.model_json_schema())
        return output_cls, prompt.model_copy(), options


# LlamaIndex shows a beginning until another one has as many fields, of which those with defaults count in the
# beginning that is shown first: it would be the last one, too.


def _to_the_end(objects: Iterable[Any], output_cls: type[BaseModel], answers: list[Answer]) -> Generator[Any]:
    """Yield the beginnings of an object, and last the object of the answer that came."""
    last = None
    for last in objects:
        yield last
    yield from _whole(output_cls, answers, last)


async def _ato_the_end(
    objects: AsyncIterable[Any], output_cls: type[BaseModel], answers: list[Answer]
) -> AsyncGenerator[Any]:
    last = None
    async for last in objects:
        yield last
    for whole in _whole(output_cls, answers, last):
        yield whole


def _whole(output_cls: type[BaseModel], answers: list[Answer], last: Any) -> list[BaseModel]:
    """Return the object of the latest answer, if it is one and is not what came last."""
    with suppress(ValidationError, IndexError):
        calls, text = answers[-1].tool_calls, answers[-1].text
        written = json.dumps(calls[0].arguments) if calls else text
        whole = output_cls.model_validate_json(written)
        return [] if whole == last else [whole]
    return []
