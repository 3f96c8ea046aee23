"""Structured output: LlamaIndex shows the schema to the model, the engine holds it to it."""

from __future__ import annotations

from typing import Any

from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import PydanticProgramMode

from llama_index.llms.blendrag.calls import STRUCTURED


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
        return super().stream_structured_predict(*self._held(output_cls, prompt, llm_kwargs), **prompt_args)

    async def astream_structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        return await super().astream_structured_predict(
            *self._held(output_cls, prompt, llm_kwargs), **prompt_args
        )

    def _held(
        self, output_cls: type[BaseModel], prompt: BasePromptTemplate, options: dict[str, Any] | None
    ) -> tuple[type[BaseModel], BasePromptTemplate, dict[str, Any]]:
        """Return what these methods take, of options that hold the answer to the class, and of a copy of the
        prompt: LlamaIndex leaves the schema's parser in it, which then shows the schema for ever."""
        options = {**(options or {}), STRUCTURED: True}
        if self.pydantic_program_mode is PydanticProgramMode.LLM:  # the other modes call a tool
            options["grammar"] = output_cls.model_json_schema()
        return output_cls, prompt.model_copy(), options
