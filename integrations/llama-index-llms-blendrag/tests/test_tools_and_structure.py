"""Tool calls and structured output, with what a model would say scripted."""

from __future__ import annotations

import json
import pickle
from typing import Any, Literal

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ToolCallResult
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.output_parsers.base import OutputParserException
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.tools import FunctionTool, ToolMetadata
from llama_index.core.types import PydanticProgramMode
from pydantic import BaseModel

from blendrag.chat.schema import json_grammar
from blendrag.errors import BlendragError, ConfigError
from llama_index.llms.blendrag import BlendLLM
from llama_index.llms.blendrag.errors import AnswerCutError

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


ADD = FunctionTool.from_defaults(add)
NOTHING = FunctionTool.from_defaults(lambda: "done", name="do_nothing", description="Does nothing.")


class Warranty(BaseModel):
    """How long something is covered."""

    years: int
    part: Literal["battery", "motor"]


WARRANTY = '{"years": 8, "part": "battery"}'


# -- tools ---------------------------------------------------------------------------------------------------


def test_call_is_read_and_the_text_around_it_kept(llm: BlendLLM, scripted: Any) -> None:
    scripted.answers = ["Let me see. " + CALL]
    response = llm.chat_with_tools([ADD], user_msg="2 + 3?")
    (call,) = llm.get_tool_calls_from_response(response)
    assert (call.tool_name, call.tool_kwargs) == ("add", {"a": 2, "b": 3})
    assert response.message.content == "Let me see. "
    assert response.message.additional_kwargs["tool_calls"][0]["function"]["name"] == "add"
    assert '"name": "add"' in scripted.prompts()[0]


def test_answer_without_a_call_is_an_error_only_where_one_is_expected(llm: BlendLLM) -> None:
    response = llm.chat_with_tools([ADD], user_msg="Hello?")
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match="called no tool"):
        llm.get_tool_calls_from_response(response)


def test_call_in_tags_that_max_tokens_cut_is_none_and_the_answer_cut(make_llm: Any, scripted: Any) -> None:
    whole = "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>\n"
    scripted.answers = [whole + "</function>\n</tool_call>"]
    llm = make_llm(tool_parser="qwen3_coder")
    room = len(scripted.tokenizer.encode(whole[: whole.index("<parameter=b>")]))
    cut = llm.chat_with_tools([ADD], user_msg="2 + 3?", max_tokens=room)
    assert cut.raw["finish_reason"] == "length" and not cut.message.additional_kwargs.get("tool_calls")
    with pytest.raises(AnswerCutError):
        llm.get_tool_calls_from_response(cut)
    assert whole.startswith(cut.raw["invalid_tool_calls"][0]["text"])
    assert llm.get_tool_calls_from_response(llm.chat_with_tools([ADD], user_msg="2 + 3?"))


@pytest.mark.parametrize("options", [{"tool_required": True}, {"tool_choice": "add"}])
def test_required_call_is_forced_by_grammar(llm: BlendLLM, scripted: Any, options: dict[str, Any]) -> None:
    scripted.answers = ['{"name": "add", "arguments": {"a": 2, "b": 3}}']
    response = llm.predict_and_call([ADD], user_msg="2 + 3?", **options)
    assert response.response == "5"
    grammar = scripted.asked[0].sampling.grammar
    assert grammar.kind == "json"
    assert grammar.value["properties"]["name"] == {"const": "add"}
    assert grammar.value["properties"]["arguments"]["required"] == ["a", "b"]


async def test_every_way_to_call_a_tool_calls_it(llm: BlendLLM, scripted: Any) -> None:
    scripted.answers = [CALL]
    responses = [
        llm.chat_with_tools([ADD], user_msg="?"),
        await llm.achat_with_tools([ADD], user_msg="?"),
        list(llm.stream_chat_with_tools([ADD], user_msg="?"))[-1],
        [one async for one in await llm.astream_chat_with_tools([ADD], user_msg="?")][-1],
    ]
    for response in responses:
        (call,) = llm.get_tool_calls_from_response(response)
        assert call.tool_kwargs == {"a": 2, "b": 3}
        assert not response.message.content
    assert (await llm.apredict_and_call([ADD], user_msg="?")).response == "5"


def test_second_call_is_left_out_where_parallel_calls_are_not_allowed(llm: BlendLLM, scripted: Any) -> None:
    scripted.answers = [CALL + CALL]
    calls = llm.get_tool_calls_from_response
    assert len(calls(llm.chat_with_tools([ADD], user_msg="?", allow_parallel_tool_calls=True))) == 2
    assert len(calls(llm.chat_with_tools([ADD], user_msg="?", allow_parallel_tool_calls=False))) == 1
    scripted.answers = [(CALL + CALL).replace('"add"', '"addd"')]
    assert len(calls(llm.chat_with_tools([ADD], user_msg="?", allow_parallel_tool_calls=False))) == 1


def test_tool_with_a_name_that_openai_would_refuse_is_found(llm: BlendLLM, scripted: Any) -> None:
    odd = FunctionTool(
        add, metadata=ToolMetadata(name="Add[int]", description="Adds.", fn_schema=ADD.metadata.fn_schema)
    )
    scripted.answers = ['<tool_call>{"name": "Add[int]", "arguments": {"a": 1, "b": 1}}</tool_call>']
    assert llm.predict_and_call([odd], user_msg="?").response == "2"


def test_history_of_calls_and_results_reaches_the_model(llm: BlendLLM, scripted: Any) -> None:
    call = ToolCallBlock(tool_call_id="c1", tool_name="add", tool_kwargs={"a": 2, "b": 3})
    result = ChatMessage("5", role="tool", additional_kwargs={"tool_call_id": "c1"})
    history = [ChatMessage("2 + 3?"), ChatMessage([call], role="assistant"), result]
    llm.chat_with_tools([ADD], chat_history=history)
    as_openai = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    foreign = ChatMessage("", role="assistant", additional_kwargs={"tool_calls": [as_openai]})
    llm.chat_with_tools([ADD], chat_history=[history[0], foreign, result])
    ours, theirs = scripted.prompts()
    assert ours == theirs
    assert (
        ours.index("2 + 3?") < ours.index('{"name": "add", "arguments": {"a": 2, "b": 3}}') < ours.rindex("5")
    )


@pytest.mark.parametrize("streaming", [True, False])
async def test_agent_calls_a_tool_and_answers(llm: BlendLLM, scripted: Any, streaming: bool) -> None:
    scripted.answers = [CALL, "It is 5."]
    agent = FunctionAgent(tools=[ADD, NOTHING], llm=llm, streaming=streaming)
    handler = agent.run("2 + 3?")
    results = [event async for event in handler.stream_events() if isinstance(event, ToolCallResult)]
    assert [str(result.tool_output) for result in results] == ["5"]
    assert str(await handler) == "It is 5."
    assert len(scripted.asked) == 2
    assert scripted.prompts()[1].index("tool_call") < scripted.prompts()[1].rindex("5")


@pytest.mark.parametrize("streaming", [True, False])
async def test_agent_tells_the_model_that_there_is_no_such_tool(
    llm: BlendLLM, scripted: Any, streaming: bool
) -> None:
    scripted.answers = [CALL.replace('"add"', '"addd"'), CALL, "It is 5."]
    handler = FunctionAgent(tools=[ADD], llm=llm, streaming=streaming).run("2 + 3?")
    results = [event async for event in handler.stream_events() if isinstance(event, ToolCallResult)]
    assert [str(result.tool_output) for result in results] == [
        "Tool addd not found. Please select a tool that is available.",
        "5",
    ]
    assert str(await handler) == "It is 5."
    assert "Tool addd not found" in scripted.prompts()[1]


@pytest.mark.parametrize("streaming", [True, False])
async def test_agent_does_not_end_with_a_call_that_cannot_be_read(
    llm: BlendLLM, scripted: Any, streaming: bool
) -> None:
    broken = CALL.replace("}}", "")
    scripted.answers = [broken]
    agent = FunctionAgent(tools=[ADD], llm=llm, streaming=streaming)
    with pytest.raises(AnswerCutError, match=r"cannot be read, ask again \(not a JSON object"):
        await agent.run("2 + 3?")
    scripted.answers = ["It is 5. " + broken]
    assert str(await agent.run("2 + 3?")).strip() == "It is 5."
    scripted.answers = [broken + CALL, "It is 5."]
    assert str(await agent.run("2 + 3?")) == "It is 5."


async def test_call_of_a_tool_that_there_is_not_counts_as_none_where_no_agent_asks(
    llm: BlendLLM, scripted: Any
) -> None:
    unknown = CALL.replace('"add"', '"addd"')
    for answer, said in ((unknown, ""), (CALL + unknown, "5"), (unknown + CALL, "5")):
        for parallel in (False, True):
            scripted.answers = [answer]
            options = {"allow_parallel_tool_calls": parallel, "error_on_no_tool_call": False}
            assert llm.predict_and_call([ADD], user_msg="?", **options).response == said
            assert (await llm.apredict_and_call([ADD], user_msg="?", **options)).response == said
    scripted.answers = [unknown]
    with pytest.raises(ValueError, match="called no tool"):
        llm.predict_and_call([ADD], user_msg="?")


async def test_workflow_hands_over_between_agents(llm: BlendLLM, scripted: Any) -> None:
    scripted.answers = [
        '<tool_call>{"name": "handoff", "arguments": {"to_agent": "adder", "reason": "sums"}}</tool_call>',
        CALL,
        "It is 5.",
    ]
    first = FunctionAgent(
        name="first", description="Greets.", tools=[NOTHING], llm=llm, can_handoff_to=["adder"]
    )
    adder = FunctionAgent(name="adder", description="Adds.", tools=[ADD], llm=llm)
    workflow = AgentWorkflow(agents=[first, adder], root_agent="first")
    assert str(await workflow.run("2 + 3?")) == "It is 5."


# -- structure -----------------------------------------------------------------------------------------------


async def test_every_way_to_structured_output_is_forced_by_the_schema(llm: BlendLLM, scripted: Any) -> None:
    scripted.answers = [WARRANTY]
    prompt = PromptTemplate("What does {text} say?")
    wanted = Warranty(years=8, part="battery")
    assert llm.structured_predict(Warranty, prompt, text="it") == wanted
    assert await llm.astructured_predict(Warranty, prompt, text="it") == wanted
    assert list(llm.stream_structured_predict(Warranty, prompt, text="it"))[-1] == wanted
    stream = await llm.astream_structured_predict(Warranty, prompt, text="it")
    assert [one async for one in stream][-1] == wanted
    messages = [ChatMessage("What does it say?")]
    structured = llm.as_structured_llm(Warranty)
    assert structured.chat(messages).raw == wanted
    assert json.loads(structured.complete("What does it say?").text) == wanted.model_dump()
    assert (await structured.achat(messages)).raw == wanted
    assert list(structured.stream_chat(messages))[-1].raw == wanted
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


@pytest.mark.parametrize("mode", [PydanticProgramMode.LLM, PydanticProgramMode.FUNCTION])
async def test_structured_stream_of_a_class_with_defaults_ends_with_the_whole(
    llm: BlendLLM, scripted: Any, mode: PydanticProgramMode
) -> None:
    call = {"name": "Leaflet", "arguments": LEAFLET}
    scripted.answers = [json.dumps(call if mode is PydanticProgramMode.FUNCTION else LEAFLET)]
    llm.pydantic_program_mode = mode
    structured, messages = llm.as_structured_llm(Leaflet), [ChatMessage("?")]
    assert list(llm.stream_structured_predict(Leaflet, PROMPT))[-1] == Leaflet(**LEAFLET)
    assert list(structured.stream_chat(messages))[-1].raw == Leaflet(**LEAFLET)
    for stream in (
        await llm.astream_structured_predict(Leaflet, PROMPT),
        await structured.astream_chat(messages),
    ):
        last = [one async for one in stream][-1]
        assert getattr(last, "raw", last) == Leaflet(**LEAFLET)


class Keywords(BaseModel):
    """What a text is about."""

    words: set[str]
    places: frozenset[str] | None = None

    @classmethod
    def model_json_schema(cls, by_alias: bool = True) -> dict[str, Any]:  # type: ignore[override]
        return super().model_json_schema(by_alias)


@pytest.mark.parametrize("mode", [PydanticProgramMode.LLM, PydanticProgramMode.FUNCTION])
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


class Leaflet(BaseModel):
    """All of it may be missing, so any beginning of one is one."""

    title: str = ""
    pages: int | None = None
    tags: list[str] = []


LEAFLET = {"title": "Batteries", "pages": 12, "tags": ["warranty", "service", "care"]}
SHORT = {"max_tokens": 14}
PROMPT = PromptTemplate("?")


@pytest.fixture(params=[PydanticProgramMode.LLM, PydanticProgramMode.FUNCTION], ids=lambda mode: mode.value)
def cut_llm(request: Any, make_llm: Any, scripted: Any) -> BlendLLM:
    """Never comes to the end of a leaflet, however it is asked for one."""
    call = {"name": "Leaflet", "arguments": LEAFLET}
    function = request.param is PydanticProgramMode.FUNCTION
    scripted.answers = [json.dumps(call if function else LEAFLET)]
    llm: BlendLLM = make_llm(**(SHORT if not function else {"max_tokens": 22}))
    llm.pydantic_program_mode = request.param
    return llm


async def test_cut_structure_is_an_error_whichever_way_it_is_asked_for(cut_llm: BlendLLM) -> None:
    structured, messages = cut_llm.as_structured_llm(Leaflet), [ChatMessage("?")]
    for ask in (
        lambda: cut_llm.structured_predict(Leaflet, PROMPT),
        lambda: list(cut_llm.stream_structured_predict(Leaflet, PROMPT)),
        lambda: structured.chat(messages),
        lambda: structured.complete("?"),
        lambda: list(structured.stream_chat(messages)),
    ):
        with pytest.raises(AnswerCutError, match=r"cut before it was whole.*Batteries"):
            ask()
    for answer in (
        cut_llm.astructured_predict(Leaflet, PROMPT),
        structured.achat(messages),
        structured.acomplete("?"),
    ):
        with pytest.raises(AnswerCutError):
            await answer
    for stream in (
        await cut_llm.astream_structured_predict(Leaflet, PROMPT),
        await structured.astream_chat(messages),
    ):
        with pytest.raises(AnswerCutError):
            _ = [one async for one in stream]


def test_cut_structure_is_what_llama_index_takes_for_unreadable_output(cut_llm: BlendLLM) -> None:
    with pytest.raises(AnswerCutError) as caught:
        cut_llm.structured_predict(Leaflet, PROMPT)
    assert isinstance(caught.value, BlendragError)
    assert isinstance(caught.value, OutputParserException)
    assert isinstance(caught.value, ValueError)
    assert "Batteries" in caught.value.text
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_stream_of_structure_shows_what_came_before_it_was_cut(cut_llm: BlendLLM) -> None:
    came: list[Any] = []
    with pytest.raises(AnswerCutError):
        came.extend(iter(cut_llm.stream_structured_predict(Leaflet, PROMPT)))
    if cut_llm.pydantic_program_mode is PydanticProgramMode.LLM:  # parts of calls are not shown
        assert came[-1].title == "Batteries"


def test_structure_that_a_stop_ends_is_an_error_too(make_llm: Any, scripted: Any) -> None:
    scripted.answers = [json.dumps(LEAFLET).partition("}")[0]]
    with pytest.raises(AnswerCutError):
        list(make_llm().stream_structured_predict(Leaflet, PROMPT))


def test_structure_that_just_fits_is_whole(make_llm: Any, scripted: Any) -> None:
    scripted.answers = [json.dumps(LEAFLET)]
    llm = make_llm()
    llm.max_tokens = len(llm.token_ids(scripted.answers[0]))
    assert llm.structured_predict(Leaflet, PROMPT) == Leaflet(**LEAFLET)


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
            program()
        with pytest.raises(AnswerCutError):
            await program.acall()
        with pytest.raises(AnswerCutError):
            list(program.stream_call())
        with pytest.raises(AnswerCutError):
            _ = [one async for one in await program.astream_call()]
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


def test_list_of_calls_whose_last_was_cut_is_not_taken_for_whole(make_llm: Any, scripted: Any) -> None:
    scripted.answers = [CALL + CALL]
    llm = make_llm()
    llm.max_tokens = len(llm.token_ids(CALL)) + 8
    with pytest.raises(AnswerCutError):
        llm.predict_and_call([ADD], user_msg="?", allow_parallel_tool_calls=True)
    assert llm.predict_and_call([ADD], user_msg="?", allow_parallel_tool_calls=False).response == "5"


@pytest.mark.parametrize("streaming", [True, False])
async def test_agent_does_not_end_with_a_cut_call(make_llm: Any, scripted: Any, streaming: bool) -> None:
    scripted.answers = ["Let me see. " + CALL]
    agent = FunctionAgent(tools=[ADD], llm=make_llm(max_tokens=16), streaming=streaming)
    with pytest.raises(AnswerCutError):
        await agent.run("2 + 3?")


@pytest.mark.parametrize("mark", ["", "[1] ", "[see below] "])
async def test_long_text_beside_tools_is_no_cut_call(make_llm: Any, scripted: Any, mark: str) -> None:
    scripted.answers = [f"{mark}A battery lasts for years, if it is kept in the cool, and is not run down."]
    agent = FunctionAgent(tools=[ADD], llm=make_llm(max_tokens=9))
    assert str(await agent.run("How long?")).startswith(f"{mark}A battery lasts for")


@pytest.mark.parametrize("begin", ["{", '{"name": "add', '[{"name": "add", "arg'])
async def test_bare_call_that_was_cut_is_one(make_llm: Any, scripted: Any, begin: str) -> None:
    llm = make_llm()
    llm.max_tokens = len(llm.token_ids(begin))
    scripted.answers = [f'{begin}ument": 1, "x": {{"y": 3}}']
    with pytest.raises(AnswerCutError):
        await FunctionAgent(tools=[ADD], llm=llm).run("2 + 3?")
