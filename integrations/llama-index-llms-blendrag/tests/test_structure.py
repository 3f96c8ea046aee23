"""Structured output, with what a model would say scripted."""

from __future__ import annotations

import json
import pickle
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.llms import ChatMessage
from llama_index.core.output_parsers.base import OutputParserException
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.tools import FunctionTool
from llama_index.core.types import PydanticProgramMode
from pydantic import BaseModel

from blendrag.chat.schema import json_grammar
from blendrag.errors import BlendragError, ConfigError
from llama_index.llms.blendrag import BlendLLM
from llama_index.llms.blendrag.errors import AnswerCutError


class Warranty(BaseModel):
    """How long something is covered."""

    years: int
    part: Literal["battery", "motor"]


WARRANTY = '{"years": 8, "part": "battery"}'


class Leaflet(BaseModel):
    """All of it may be missing, so any beginning of one is one."""

    title: str = ""
    pages: int | None = None
    tags: list[str] = []


LEAFLET = {"title": "Batteries", "pages": 12, "tags": ["warranty", "service", "care"]}
PROMPT = PromptTemplate("What does {text} say?")
MODES = [PydanticProgramMode.LLM, PydanticProgramMode.FUNCTION]


def ways_to(output_cls: type[BaseModel], llm: BlendLLM) -> list[Callable[[], Awaitable[Any]]]:
    """Every way to structured output: to the object that it gives last."""
    structured, messages = llm.as_structured_llm(output_cls), [ChatMessage("What does it say?")]

    def of(call: Callable[..., Any], *given: Any, **options: Any) -> Callable[[], Awaitable[Any]]:
        async def last() -> Any:
            found = call(*given, **options)
            found = await found if hasattr(found, "__await__") else found
            if hasattr(found, "__aiter__"):
                found = [one async for one in found][-1]
            elif hasattr(found, "__next__"):
                found = list(found)[-1]
            return getattr(found, "raw", found)

        return last

    return [
        *(
            of(predict, output_cls, PROMPT, text="it")
            for predict in (
                llm.structured_predict, llm.astructured_predict, llm.stream_structured_predict,
                llm.astream_structured_predict,
            )
        ),
        *(
            of(chat, messages)
            for chat in (structured.chat, structured.achat, structured.stream_chat, structured.astream_chat)
        ),
        *(of(complete, "What does it say?") for complete in (structured.complete, structured.acomplete)),
    ]  # fmt: skip


async def test_every_way_to_structured_output_is_forced_by_the_schema(llm: BlendLLM, scripted: Any) -> None:
    scripted.answers = [WARRANTY]
    for way in ways_to(Warranty, llm):
        assert await way() == Warranty(years=8, part="battery")
    for asked in scripted.asked:
        held = json_grammar(Warranty.model_json_schema(), asked.sampling.max_tokens)
        assert asked.sampling.grammar == held
    assert all("Here's a JSON schema to follow" in shown for shown in scripted.prompts())


def test_structured_stream_grows(llm: BlendLLM, scripted: Any) -> None:
    scripted.answers = [WARRANTY]
    partial = list(llm.stream_structured_predict(Warranty, PromptTemplate("?")))
    assert len(partial) > 3
    assert partial[-1] == Warranty(years=8, part="battery")
    assert getattr(partial[0], "part", None) != "battery"


@pytest.mark.parametrize("mode", MODES)
async def test_class_with_defaults_comes_whole_at_the_end_of_every_way(
    llm: BlendLLM, scripted: Any, mode: PydanticProgramMode
) -> None:
    call = {"name": "Leaflet", "arguments": LEAFLET}
    scripted.answers = [json.dumps(call if mode is PydanticProgramMode.FUNCTION else LEAFLET)]
    llm.pydantic_program_mode = mode
    for way in ways_to(Leaflet, llm):
        assert await way() == Leaflet(**LEAFLET)


class Keywords(BaseModel):
    """Words and places that a text is about."""

    words: set[str]
    places: frozenset[str] | None = None

    @classmethod
    def model_json_schema(cls, by_alias: bool = True) -> dict[str, Any]:  # type: ignore[override]
        return super().model_json_schema(by_alias)


@pytest.mark.parametrize("mode", MODES)
def test_set_is_made_of_a_list_that_may_repeat_an_item(llm: BlendLLM, scripted: Any, mode: Any) -> None:
    llm.pydantic_program_mode = mode
    found = {"words": ["red", "car", "red"], "places": ["Bergen", "Bergen"]}
    function = mode is PydanticProgramMode.FUNCTION
    scripted.answers = [json.dumps({"name": "Keywords", "arguments": found} if function else found)]
    asked = llm.structured_predict(Keywords, PromptTemplate("?"))
    assert asked == Keywords(words={"red", "car"}, places=frozenset({"Bergen"}))
    distinct = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    with pytest.raises(ConfigError, match="uniqueItems"):
        llm.complete("?", grammar=distinct)
    tool = FunctionTool.from_defaults(lambda words: words, name="tag", fn_schema=Keywords)
    with pytest.raises(ConfigError, match="uniqueItems"):  # which nobody makes a set of
        llm.predict_and_call([tool], user_msg="?", tool_required=True)


def test_prompt_used_for_structure_stays_a_prompt(llm: BlendLLM, scripted: Any) -> None:
    scripted.answers = [WARRANTY, "Hello."]
    prompt = PromptTemplate("Say hello.")
    llm.structured_predict(Warranty, prompt)
    llm.predict(prompt)
    assert "schema" in scripted.prompts()[0]
    assert "schema" not in scripted.prompts()[1]


def test_structure_by_tool_call_is_possible_too(llm: BlendLLM, scripted: Any) -> None:
    scripted.answers = [json.dumps({"name": "Warranty", "arguments": json.loads(WARRANTY)})]
    llm.pydantic_program_mode = PydanticProgramMode.FUNCTION
    assert llm.structured_predict(Warranty, PromptTemplate("?")) == Warranty(years=8, part="battery")
    assert scripted.asked[0].sampling.grammar.value["properties"]["name"] == {"const": "Warranty"}


# -- what was cut --------------------------------------------------------------------------------------------


@pytest.fixture(params=MODES, ids=lambda mode: mode.value)
def cut_llm(request: Any, make_llm: Any, scripted: Any) -> BlendLLM:
    """Never comes to the end of a leaflet, however it is asked for one."""
    call = {"name": "Leaflet", "arguments": LEAFLET}
    function = request.param is PydanticProgramMode.FUNCTION
    scripted.answers = [json.dumps(call if function else LEAFLET)]
    llm: BlendLLM = make_llm(max_tokens=22 if function else 14)
    llm.pydantic_program_mode = request.param
    return llm


async def test_cut_structure_is_an_error_whichever_way_it_is_asked_for(cut_llm: BlendLLM) -> None:
    for way in ways_to(Leaflet, cut_llm):
        with pytest.raises(AnswerCutError, match=r"cut before it was whole.*Batteries"):
            await way()


def test_cut_structure_is_what_llama_index_takes_for_unreadable_output(cut_llm: BlendLLM) -> None:
    with pytest.raises(AnswerCutError) as caught:
        cut_llm.structured_predict(Leaflet, PROMPT, text="it")
    assert isinstance(caught.value, BlendragError)
    assert isinstance(caught.value, OutputParserException)
    assert isinstance(caught.value, ValueError)
    assert "Batteries" in caught.value.text
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_stream_of_structure_shows_what_came_before_it_was_cut(cut_llm: BlendLLM) -> None:
    came: list[Any] = []
    with pytest.raises(AnswerCutError):
        came.extend(iter(cut_llm.stream_structured_predict(Leaflet, PROMPT, text="it")))
    if cut_llm.pydantic_program_mode is PydanticProgramMode.LLM:  # parts of calls are not shown
        assert came[-1].title == "Batteries"


def test_structure_that_a_stop_ends_is_an_error_too(make_llm: Any, scripted: Any) -> None:
    scripted.answers = [json.dumps(LEAFLET).partition("}")[0]]
    with pytest.raises(AnswerCutError):
        list(make_llm().stream_structured_predict(Leaflet, PROMPT, text="it"))


def test_structure_that_just_fits_is_whole(make_llm: Any, scripted: Any) -> None:
    scripted.answers = [json.dumps(LEAFLET)]
    llm = make_llm()
    llm.max_tokens = len(llm.token_ids(scripted.answers[0]))
    assert llm.structured_predict(Leaflet, PROMPT, text="it") == Leaflet(**LEAFLET)


@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize", "compact_accumulate"])
@pytest.mark.parametrize("output_cls", [None, Leaflet])
def test_query_engine_gives_no_part_of_a_cut_structure(cut_llm: BlendLLM, mode: Any, output_cls: Any) -> None:
    llm = cut_llm if output_cls else cut_llm.as_structured_llm(Leaflet)
    synthesizer = get_response_synthesizer(llm=llm, response_mode=mode, output_cls=output_cls)
    nodes = [NodeWithScore(node=TextNode(text="Batteries last."), score=1.0)]
    try:
        given = str(synthesizer.synthesize("How long?", nodes=nodes))
    except ValueError as error:  # LlamaIndex validates what it answers itself
        given = str(error).partition("cut before")[0]
    assert "Batteries" not in given


async def test_program_that_calls_a_tool_ends_with_the_error(make_llm: Any, scripted: Any) -> None:
    scripted.answers = [json.dumps({"name": "Leaflet", "arguments": LEAFLET})]
    for parallel in (False, True):
        program = FunctionCallingProgram.from_defaults(
            Leaflet, prompt=PROMPT, llm=make_llm(max_tokens=22), allow_parallel_tool_calls=parallel
        )
        with pytest.raises(AnswerCutError):
            program(text="it")
        with pytest.raises(AnswerCutError):
            await program.acall(text="it")
        with pytest.raises(AnswerCutError):
            list(program.stream_call(text="it"))
        with pytest.raises(AnswerCutError):
            _ = [one async for one in await program.astream_call(text="it")]
    grammars = {str(asked.sampling.grammar) for asked in scripted.asked}
    assert len(grammars) == 1 and "Leaflet" in grammars.pop(), "a stream is held to the call, too"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("mode", ["compact", "refine"])
def test_answers_that_are_filtered_by_structure_are_held_to_it(
    llm: BlendLLM, scripted: Any, mode: Any, streaming: bool
) -> None:
    found = {"query_satisfied": True, "answer": "Eight years."}
    scripted.answers = [json.dumps({"name": "StructuredRefineResponse", "arguments": found})]
    synthesizer = get_response_synthesizer(
        llm=llm, response_mode=mode, structured_answer_filtering=True, streaming=streaming
    )
    nodes = [
        NodeWithScore(node=TextNode(text=text), score=1.0) for text in ("Batteries last.", "Motors too.")
    ]
    assert str(synthesizer.synthesize("How long?", nodes=nodes)) == "Eight years."
    assert all(asked.sampling.grammar for asked in scripted.asked)
