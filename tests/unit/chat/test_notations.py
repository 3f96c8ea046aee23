"""Calls as families of models write them, read by vLLM's real parsers, whole and streamed."""

from __future__ import annotations

import json
from copy import deepcopy
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.chat.calls import OPEN, Reading, ended_by, read_answer, visible
from blendrag.chat.request import ChatRequest
from blendrag.chat.tools import whole_tool
from blendrag.engine.client.tool_parser import NOTATIONS, ToolParser, server_tool_parser, tool_parser_name
from blendrag.errors import ConfigError

TOKENS = [
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<tool_call>", "</tool_call>", "<|tool_call|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call>",
    "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<tool_calls>", "</tool_calls>",
    "<start_function_call>", "<end_function_call>", "<escape>", "<|action_start|>", "<|plugin|>",
    "<|action_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<minimax:tool_call>", "</minimax:tool_call>",
    "<seed:tool_call>", "</seed:tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>",
]  # fmt: skip

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = (
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock"}},
)
REQUEST = ChatRequest([{"role": "user", "content": "?"}], tools=TOOLS)

A = '{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}'
B = '{"name": "clock", "arguments": {}}'
A_, B_ = A.replace("arguments", "parameters"), B.replace("arguments", "parameters")
OSLO, BOTH = '{"city": "Oslo", "days": 2}', 2

# Parser; an answer; how many of the two calls are in it; its text.
WRITTEN = [
    ("hermes", f"I look.\n<tool_call>\n{A}\n</tool_call>\n<tool_call>\n{B}\n</tool_call>", BOTH, "I look.\n"),
    ("llama3_json", A_, 1, ""),
    ("llama3_json", f"<|python_tag|>{A_}", 1, ""),
    ("llama3_json", f"{A_}; {B_}", BOTH, ""),
    ("llama3_json", f"I look. {A_}", 1, "I look. "),
    ("llama3_json", f"I look. {A_} and then {B_}", BOTH, "I look. "),
    ("llama3_json", f"First:\n{A_}\nSecond:\n{B_}", BOTH, "First:\n"),
    ("llama3_json", f"{A_}<|eom_id|>{B_}", BOTH, ""),
    ("llama4_pythonic", '[weather(city="Oslo", days=2), clock()]', BOTH, ""),
    ("pythonic", '[weather(city="Oslo", days=2), clock()]', BOTH, ""),
    ("gemma4", 'I look.<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>', 1, "I look."),
    ("mistral", f"[TOOL_CALLS] [{A}, {B}]", BOTH, ""),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{OSLO}[TOOL_CALLS]clock[ARGS]{{}}", BOTH, ""),
    ("mistral", f"I look.[TOOL_CALLS]weather{OSLO}", 1, "I look."),
    ("mistral", f"[{A}]", 1, ""),
    ("phi4_mini_json", f"functools[{A}, {B}]", BOTH, ""),
    ("granite", f"<|tool_call|>[{A}, {B}]", BOTH, ""),
    ("granite", f"<tool_call>[{A}]", 1, ""),
    ("granite", f"[{A}]", 1, ""),
    ("granite4", f"<tool_call>\n{A}\n</tool_call>", 1, ""),
    (
        "glm45",
        "I look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>clock\n</tool_call>",
        BOTH,
        "I look.\n",
    ),
    (
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n"
        "2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        BOTH,
        "I look.\n",
    ),
    ("jamba", f"<tool_calls>[{A}, {B}]</tool_calls>", BOTH, ""),
    ("hunyuan_a13b", f"<tool_calls>[{A}]</tool_calls>", 1, ""),
    (
        "functiongemma",
        "I look.<start_function_call>call:weather{city:<escape>Oslo<escape>,days:2}<end_function_call>"
        "<start_function_call>call:clock{}<end_function_call>",
        BOTH,
        "I look.",
    ),
    ("internlm", f"I look.<|action_start|><|plugin|>{A_}<|action_end|>", 1, "I look."),
    ("lfm2", 'I look.<|tool_call_start|>[weather(city="Oslo", days=2)]<|tool_call_end|>', 1, "I look."),
    ("olmo3", '<function_calls>\nweather(city="Oslo", days=2)\nclock()\n</function_calls>', BOTH, ""),
    ("longcat", f"<longcat_tool_call>{A}</longcat_tool_call>", 1, ""),
    ("xlam", f"[{A}, {B}]", BOTH, ""),
]  # fmt: skip


@pytest.fixture(scope="module")
def speaker(tokenizer: Any) -> Any:
    """A tokenizer with the tokens of all families."""
    speaker = deepcopy(tokenizer)
    speaker.add_special_tokens({"additional_special_tokens": [*dict.fromkeys(TOKENS)]})
    return speaker


@pytest.fixture(scope="module")
def folder(speaker: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speaker")
    speaker.save_pretrained(folder)
    return folder


def parser_of(name: str, speaker: Any) -> ToolParser:
    return ToolParser(name, speaker, [whole_tool(tool) for tool in TOOLS], {})


def streamed(text: str, parser: ToolParser | None) -> tuple[str, Reading]:
    """What is shown before the answer's end, character by character; the answer."""
    shown = ""
    for part in accumulate(text):
        now = visible(part, REQUEST, parser)
        assert now.startswith(shown) and part.startswith(now)
        shown = now
    reading = read_answer(text, REQUEST, parser)
    assert reading.text.startswith(shown)
    return shown, reading


@pytest.mark.parametrize(("name", "written", "calls", "said"), WRITTEN)
def test_call_in_a_familys_notation_is_read(
    name: str, written: str, calls: int, said: str, speaker: Any
) -> None:
    shown, reading = streamed(written, parser_of(name, speaker))
    assert not reading.invalid
    assert (reading.text, shown) == (said, said)
    expected = [("weather", json.loads(OSLO)), ("clock", {})][:calls]
    assert [(call.name, call.arguments) for call in reading.calls] == expected


OTHERS = [one for one in NOTATIONS[1:] if not (OPEN in one.marks and one.end)]
"""Whose calls are not between the tags that tools are described with."""


@pytest.mark.parametrize("notation", OTHERS, ids=lambda one: one.parser)
def test_call_as_tools_are_described_is_read_whatever_the_family(notation: Any, speaker: Any) -> None:
    """A template that names the family's marks need not show it tools."""
    call = f"<tool_call>\n{A}\n</tool_call>"
    shown, reading = streamed(f"I look.\n{call}", parser_of(notation.parser, speaker))
    assert (shown, reading.text, reading.invalid) == ("I look.\n", "I look.\n", ())
    assert [call.arguments for call in reading.calls] == [json.loads(OSLO)]


@pytest.mark.parametrize("city", ["Oslo", "Os\nlo", "</tool_call>"])
def test_text_behind_a_call_is_kept_and_what_is_in_it_is_its_own(city: str, speaker: Any) -> None:
    call = f"<tool_call>\n{A.replace('Oslo', city)}\n</tool_call>"
    shown, reading = streamed(f"I look.\n{call}\nThat is all.", parser_of("hermes", speaker))
    assert (shown, reading.text, reading.invalid) == ("I look.\n", "I look.\n\nThat is all.", ())
    assert [call.arguments for call in reading.calls] == [{"city": city, "days": 2}]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{city:<escape>7<escape>,days:<escape>2<escape>}", {"city": "7", "days": 2}),
        ("{city:<escape>Oslo<escape>,days:2}\n", {"city": "Oslo", "days": 2}),
        ("{city:<escape>Oslo<escape>,days:two}<end_function_call>", {"city": "Oslo"}),
        ("{city:Oslo}<end_function_call>", {}),
    ],
)
def test_call_between_escapes_is_read_as_far_as_it_goes(
    written: str, arguments: dict[str, Any], speaker: Any
) -> None:
    clock = "<start_function_call>call:clock{}<end_function_call>"
    text = f"I look.{clock}<start_function_call>call:weather{written}"
    reading = read_answer(text, REQUEST, parser_of("functiongemma", speaker))
    assert (reading.text, reading.invalid) == ("I look.", ())
    assert [call.arguments for call in reading.calls] == [{}, arguments]


def test_call_of_gpt_oss_is_read(speaker: Any) -> None:
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    written = (
        "<|channel|>analysis<|message|>A map?<|end|><|start|>assistant<|channel|>commentary"
        f" to=functions.weather <|constrain|>json<|message|>{OSLO}<|call|>"
    )
    ids = encoding.encode(written, allowed_special="all")
    reading = read_answer(written, REQUEST, parser_of("openai", speaker), ids)
    assert [(call.name, call.arguments) for call in reading.calls] == [("weather", json.loads(OSLO))]
    assert reading.text == "" == visible(written, REQUEST, parser_of("openai", speaker))


@pytest.mark.parametrize(("name", "written", "calls", "said"), WRITTEN)
def test_call_that_is_cut_off_is_kept_and_not_shown(
    name: str, written: str, calls: int, said: str, speaker: Any
) -> None:
    parser = parser_of(name, speaker)
    for end in range(len(said) + 1, len(written)):
        part = written[:end]
        _, reading = streamed(part, parser)
        kept = [
            reading.text,
            *(call.name for call in reading.calls),
            *(call.text for call in reading.invalid),
        ]
        for tool in ("weather", "clock"):
            assert part.count(tool) <= sum(text.count(tool) for text in kept), part


# Every parser that `auto` chooses, in its order: a call with all arguments; "clock" in place of "weather".
CITY, DAYS = "Oslo and Bergen", "two"
FULL = {"city": CITY, "days": DAYS}
J = json.dumps({"name": "weather", "arguments": FULL})
CUT = {
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter'
    f' name="city" string="true">{CITY}</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="true">'
    f"{DAYS}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    f"{json.dumps(FULL)}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{json.dumps(FULL)}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{json.dumps(FULL)}<|tool_call_end|><|tool_calls_section_end|>",
    "minimax_m2": f'<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">{CITY}</parameter>\n'
    f'<parameter name="days">{DAYS}</parameter>\n</invoke>\n</minimax:tool_call>',
    "seed_oss": f"<seed:tool_call>\n<function=weather>\n<parameter=city>{CITY}</parameter>\n"
    f"<parameter=days>{DAYS}</parameter>\n</function>\n</seed:tool_call>",
    "longcat": f"<longcat_tool_call>\n{J}\n</longcat_tool_call>",
    "gemma4": f'<|tool_call>call:weather{{city:<|"|>{CITY}<|"|>,days:<|"|>{DAYS}<|"|>}}<tool_call|>',
    "functiongemma": f"<start_function_call>call:weather{{city:<escape>{CITY}<escape>,days:<escape>{DAYS}"
    "<escape>}<end_function_call>",
    "lfm2": f'<|tool_call_start|>[weather(city="{CITY}", days="{DAYS}")]<|tool_call_end|>',
    "mistral": f"[TOOL_CALLS]weather[ARGS]{json.dumps(FULL)}",
    "internlm": f"<|action_start|><|plugin|>{J.replace('arguments', 'parameters')}<|action_end|>",
    "phi4_mini_json": f"functools[{J}]",
    "granite": f"<|tool_call|>[{J}]",
    "granite4": f"<tool_call>\n{J}\n</tool_call>",
    "jamba": f"<tool_calls>[{J}]</tool_calls>",
    "hunyuan_a13b": f"<tool_calls>[{J}]</tool_calls>",
    "olmo3": f'<function_calls>\nweather(city="{CITY}", days="{DAYS}")\n</function_calls>',
    "glm45": f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n"
    f"<arg_key>days</arg_key>\n<arg_value>{DAYS}</arg_value>\n</tool_call>",
    "qwen3_coder": f"<tool_call>\n<function=weather>\n<parameter=city>\n{CITY}\n</parameter>\n"
    f"<parameter=days>\n{DAYS}\n</parameter>\n</function>\n</tool_call>",
    "hermes": f"<tool_call>\n{J}\n</tool_call>",
    "pythonic": f'[weather(city="{CITY}", days="{DAYS}")]',
    "llama3_json": f"<|python_tag|>{J.replace('arguments', 'parameters')}",
}  # fmt: skip


@pytest.mark.parametrize("notation", NOTATIONS[1:], ids=lambda notation: notation.parser)
def test_no_call_is_half_a_call_and_no_mark_is_text_wherever_tokens_end(notation: Any, speaker: Any) -> None:
    one, name = CUT[notation.parser], notation.parser
    between = "; " if name == "llama3_json" else "\n"
    two = one + between + one.removeprefix("<|python_tag|>").replace("weather", "clock")
    texts = {"type": "object", "properties": {name: {"type": "string"} for name in FULL}}
    tools = [{"type": "function", "function": {"name": n, "parameters": texts}} for n in ("weather", "clock")]
    request = ChatRequest(REQUEST.messages, tools=tuple(tools))
    parser = ToolParser(name, speaker, [whole_tool(tool) for tool in tools], {})
    whole = read_answer(one, request, parser)
    assert [call.arguments for call in whole.calls] == [FULL] and not whole.text and not whole.invalid
    if name != "pythonic":  # whose calls stand alone
        said = read_answer(f"I look.{one}", request, parser)
        assert (said.text, [call.arguments for call in said.calls]) == ("I look.", [FULL])
    for end in range(1, len(two)):
        part = two[:end]
        assert end > len(one) or not visible(part, request, parser)
        read = read_answer(part, request, parser, cut=True)
        assert all(call.arguments == FULL for call in read.calls), (part, read)
        raw = (*notation.marks, notation.end or "</", "weather(", "{")
        assert not any(mark in read.text for mark in raw), (part, read)
        if end > len(one) + 30 and name != "pythonic":  # whose lists are read as a whole, or not at all
            assert [call.name for call in read.calls] == ["weather", "clock"][: 1 if read.invalid else 2]
            assert ended_by(read, "length") == ("length" if read.invalid else "tool_calls")


AS_JSON = {name: written for name, written in CUT.items() if J in written or name == "llama3_json"}


@pytest.mark.parametrize(
    "second", ['{"name": "clock", "arguments": {"a": 1,}}', '{"name": "wether"}', "", '{"']
)
@pytest.mark.parametrize("name", AS_JSON)
def test_call_behind_one_that_cannot_be_read_is_kept(name: str, second: str, speaker: Any) -> None:
    written = AS_JSON[name]
    mark = next(one.marks[0] for one in NOTATIONS if one.parser == name)
    again = written[: written.index("{")] + second + written[written.rindex("}") + 1 :]
    read = read_answer(f"{written}\n{again if second else mark}", REQUEST, parser_of(name, speaker))
    assert [call.arguments for call in read.calls] == [FULL] and len(read.invalid) == 1
    assert read.text == "" and read.invalid[0].text.strip("[]") == second


@pytest.mark.parametrize(
    "notation", [one for one in NOTATIONS if one.marks], ids=lambda notation: notation.parser
)
def test_json_behind_a_mark_is_a_call_once_it_is_whole(notation: Any, speaker: Any) -> None:
    parser, mark = parser_of(notation.parser, speaker), notation.marks[0]
    one = mark + J
    two = f"{one}</{mark[1:]}\n{one.replace('weather', 'clock')}"
    for end in range(len(mark) + 1, len(two) + 1):
        read = read_answer(two[:end], REQUEST, parser, cut=True)
        assert [call.name for call in read.calls] == ["weather", "clock"][
            : (end >= len(one)) + (end == len(two))
        ]
        assert all(call.arguments == FULL for call in read.calls) and mark not in read.text


TAGGED = ["hermes", "granite", "granite4", ""]


@pytest.mark.parametrize(
    "written",
    [
        '<tool_call>weather(city="Oslo")</tool_call>',
        '<tool_call>\nweather\n{"city": "Oslo"}\n</tool_call>',
        "<tool_call>wether(x=1, y=2)</tool_call>",
        "<tool_call>clock\n</tool_call>",
        "<tool_call> clock",
        CUT["glm45"],
    ],
)
@pytest.mark.parametrize("name", TAGGED)
def test_call_that_is_not_json_is_invalid_and_not_shown(name: str, written: str, speaker: Any) -> None:
    shown, reading = streamed(f"I look. {written}", parser_of(name, speaker) if name else None)
    assert (shown, reading.text, reading.calls) == ("I look. ", "I look. ", ())
    assert reading.invalid and reading.invalid[0].text and reading.invalid[0].text in written


@pytest.mark.parametrize(
    ("answer", "early"),
    [
        ("Use the <tool_call> tag to call.", None),
        ("Put it between <tool_call> and </tool_call>.", None),
        ("It begins with <tool_call>\nand a line.", "It begins with "),
        ("Behind <tool_call> clo", "Behind "),
    ],
)
@pytest.mark.parametrize("name", TAGGED)
def test_prose_that_mentions_a_tag_is_text(name: str, answer: str, early: str | None, speaker: Any) -> None:
    shown = answer if early is None else early
    assert streamed(answer, parser_of(name, speaker) if name else None) == (shown, Reading(answer))


@pytest.mark.parametrize(
    "answer",
    [
        "Hermes models write `<tool_call>{...}</tool_call>`, we do not.",
        'A model writes <tool_call>\n{"name":"x","arguments":{}}\n</tool_call> there.',
    ],
)
def test_tag_of_another_family_that_is_only_mentioned_is_text(answer: str, speaker: Any) -> None:
    _, reading = streamed(answer, parser_of("mistral", speaker))
    assert reading == Reading(answer)


def test_text_behind_a_call_of_llama_is_kept(speaker: Any) -> None:
    for before in ("", "I look. "):
        reading = read_answer(f"{before}{A_} That is all.", REQUEST, parser_of("llama3_json", speaker))
        assert len(reading.calls) == 1 and reading.text == f"{before}That is all."


@pytest.mark.parametrize(
    "answer", ["It is cold.", "1 < 2, [a] and {b}", '{"a": 1}', "", "<tool", "```\nx\n```", "[1] says so."]
)
@pytest.mark.parametrize("name", sorted({*(one[0] for one in WRITTEN), *CUT}))
def test_text_is_not_taken_for_a_call_nor_held_back(name: str, answer: str, speaker: Any) -> None:
    parser = parser_of(name, speaker)
    shown, reading = streamed(answer, parser)
    assert (reading.text, reading.calls, reading.invalid) == (answer, (), ())
    if parser.marks is not None and answer in ("It is cold.", "[1] says so."):
        assert shown == answer


@pytest.mark.parametrize("name", ["hermes", "glm45", "mistral", "llama3_json"])
def test_call_of_no_tool_is_invalid_or_text(name: str, speaker: Any) -> None:
    written = next(text for parser, text, *_ in WRITTEN if parser == name).replace("weather", "wether")
    reading = read_answer(written, REQUEST, parser_of(name, speaker))
    assert "weather" not in [call.name for call in reading.calls]
    assert reading.invalid or reading.text == written


pieces = st.lists(
    st.sampled_from(
        [*TOKENS, A, B, A_, OSLO, "weather", "clock", "\n", "x ", "[", "{", "<", "</", "functools["]
    )
)


@given(st.sampled_from([one.parser for one in NOTATIONS]), pieces)
def test_streamed_text_is_the_whole_answers(speaker: Any, name: str, parts: list[str]) -> None:
    streamed("".join(parts), parser_of(name, speaker))


def test_unknown_parser_shows_nothing_that_may_be_a_call(speaker: Any) -> None:
    parser = parser_of("xlam", speaker)
    assert parser.marks is None and visible("I look.", REQUEST, parser) == ""


def test_one_call_at_most_is_one(speaker: Any) -> None:
    one = ChatRequest(REQUEST.messages, tools=TOOLS, parallel_tool_calls=False)
    for parser, text in ((parser_of("hermes", speaker), WRITTEN[0][1]), (None, WRITTEN[0][1])):
        assert [call.name for call in read_answer(text, one, parser).calls] == ["weather"]


@pytest.mark.parametrize("notation", NOTATIONS, ids=lambda notation: notation.parser)
def test_template_is_recognised_by_its_family(notation: Any, speaker: Any) -> None:
    model = deepcopy(speaker)
    model.chat_template = f"{{{{ messages }}}} {' '.join(notation.signs or notation.marks)} {{{{ tools }}}}"
    assert tool_parser_name("auto", model) == notation.parser
    assert tool_parser_name("none", model) == ""


def test_template_without_calls_has_no_parser(tokenizer: Any, model_dir: Path) -> None:
    assert tool_parser_name("auto", tokenizer) == ""
    assert server_tool_parser("auto", model_dir) == "hermes", "as its clients have it write"


def test_wrong_parser_is_a_clear_error(tokenizer: Any, folder: Path, tmp_path: Path) -> None:
    assert server_tool_parser("hermes", folder) == "hermes"
    assert server_tool_parser("none", tmp_path / "no model") == ""
    with pytest.raises(ConfigError, match=r"no tool_parser 'hermez'; .*did you mean hermes\?"):
        server_tool_parser("hermez", folder)
    with pytest.raises(ConfigError, match=r"tool_parser 'mistral' cannot read this model: .*token"):
        tool_parser_name("mistral", tokenizer)
    model = deepcopy(tokenizer)
    model.chat_template = "[TOOL_CALLS]"
    assert tool_parser_name("auto", model) == "", "nobody has named it"
