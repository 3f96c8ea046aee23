"""Thinking told from answers, by vLLM's real parsers, however an engine cuts its pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from blendrag.engine.client.generation import Delta, Sampling, vllm_reasoning
from blendrag.engine.client.reasoning import Reasoning, engine_parser, thinking_parser
from blendrag.engine.compat.requests import detokenizer
from blendrag.errors import ConfigError

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
QUESTION, OPEN, CLOSED = "Who? ", "Who? <think>\n", "Who? <think>\n\n</think>\n\n"
THOUGHT, ANSWER = "Hm, 1 < 2 and é 🤔.\nSo", "It is <b>two</b> 🙂.\n\nYes."


@pytest.fixture(scope="module")
def thinker(tokenizer: Any) -> Any:
    """A tokenizer with the tags that Qwen3 has."""
    thinker = deepcopy(tokenizer)
    thinker.add_tokens(TAGS)
    return thinker


@pytest.fixture(scope="module")
def thinking(thinker: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder."""
    folder = tmp_path_factory.mktemp("thinking")
    thinker.save_pretrained(folder)
    return folder


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def reader_of(wanted: str, tokenizer: Any, prompt: str, variables: dict[str, Any] | None = None) -> Reasoning:
    name, automatic = thinking_parser(wanted, tokenizer), wanted == "auto"
    return Reasoning(name, tokenizer, ids(tokenizer, prompt), variables or {}, automatic=automatic)


def deltas(
    reader: Reasoning, tokenizer: Any, prompt: str, answer: str, cuts: Iterable[int], late: int
) -> Iterator[Delta]:
    """An engine's pieces of ``answer``, cut before these of its tokens. ``late``: by how many characters the
    text is behind the tokens, as it is where a stop is looked for."""
    tokens = ids(tokenizer, answer)
    decode = detokenizer(tokenizer, ids(tokenizer, prompt), reader.skip_special_tokens)
    texts = [decode(token) for token in tokens]
    text, ends = "".join(texts), list(accumulate(map(len, texts), initial=0))
    for begin, end in pairwise(sorted({0, len(tokens), *(min(cut, len(tokens)) for cut in cuts)})):
        last = end == len(tokens)
        shown = text[max(0, ends[begin] - late) : None if last else max(0, ends[end] - late)]
        yield Delta(shown, tokens[begin:end], 0.1, "stop" if last else None)


def read(
    wanted: str,
    tokenizer: Any,
    prompt: str,
    answer: str,
    cuts: Iterable[int] | None = None,
    late: int = 0,
    **variables: Any,
) -> tuple[str, str]:
    """Thinking and answer, of pieces of one token unless cut otherwise."""
    reader = reader_of(wanted, tokenizer, prompt, variables)
    cuts = range(len(ids(tokenizer, answer))) if cuts is None else cuts
    pieces = [reader.feed(delta) for delta in deltas(reader, tokenizer, prompt, answer, cuts, late)]
    return "".join(thought for thought, _ in pieces), "".join(said for _, said in pieces)


WHOLE = f"{THOUGHT}</think>\n\n{ANSWER}"
CALL = '<tool_call>\n{"name": "clock"}\n</tool_call>'
CASES = [
    ("auto", OPEN, WHOLE, THOUGHT, ANSWER),
    ("auto", QUESTION, f"<think>\n{WHOLE}", THOUGHT, ANSWER),
    ("auto", CLOSED + QUESTION, f"<think>\n{WHOLE}", THOUGHT, ANSWER),  # a turn before has thought
    ("auto", QUESTION, f"<think>\n{THOUGHT}", THOUGHT, ""),  # cut off by max_tokens
    ("auto", QUESTION, f"<think>\n\n</think>\n\n{ANSWER}", "", ANSWER),
    ("auto", QUESTION, f" \n\n<think>\n{WHOLE}", THOUGHT, ANSWER),
    ("auto", OPEN, f"{THOUGHT}</think>{CALL}", THOUGHT, CALL),
    ("deepseek_r1", QUESTION, WHOLE, THOUGHT, ANSWER),
    ("qwen3", QUESTION, f"<think>\n{WHOLE}", THOUGHT, ANSWER),
    ("qwen3", OPEN, WHOLE, THOUGHT, ANSWER),
    ("qwen3", QUESTION, f"<think>\n{THOUGHT}{CALL}", THOUGHT, CALL),  # a call ends the thinking, too
    ("qwen3", CLOSED, ANSWER, "", ANSWER),
    ("olmo3", OPEN, WHOLE, THOUGHT, ANSWER),
]


@pytest.mark.parametrize(("wanted", "prompt", "answer", "thought", "said"), CASES)
@given(cuts=st.sets(st.integers(1, 20)), late=st.integers(0, 12))
def test_thinking_is_told_from_the_answer_wherever_the_engine_cuts_its_pieces(
    thinker: Any,
    wanted: str,
    prompt: str,
    answer: str,
    thought: str,
    said: str,
    cuts: set[int],
    late: int,
) -> None:
    assert read(wanted, thinker, prompt, answer, cuts, late) == (thought, said)


@given(
    st.lists(st.sampled_from([*TAGS, "a", " \n", "é🤔", "<", "think>", "</"])), st.sets(st.integers(1, 20))
)
def test_piece_of_several_tokens_is_read_whole(thinker: Any, words: list[str], cuts: set[int]) -> None:
    answer = "x" + "".join(words)  # does not begin with a tag
    assert read("auto", thinker, QUESTION, answer, cuts) == ("", answer)
    for wanted, prompt in (("auto", OPEN), ("qwen3", QUESTION)):
        whole = read(wanted, thinker, prompt, answer)
        assert read(wanted, thinker, prompt, answer, cuts, late=3) == whole
        if not any(tag in answer for tag in TAGS):
            assert whole == (answer, "")


@pytest.mark.parametrize("prompt", [QUESTION, CLOSED])
@pytest.mark.parametrize("answer", [ANSWER, f" \n\n {ANSWER}", f"{ANSWER} <think>", " \n\n"])
def test_answer_of_a_model_that_may_think_and_does_not_is_left_unchanged(
    thinker: Any, prompt: str, answer: str
) -> None:
    assert read("auto", thinker, prompt, answer) == ("", answer)


def test_text_that_a_stop_has_cut_is_held_back(thinker: Any) -> None:
    reader = reader_of("auto", thinker, OPEN)
    tokens = ids(thinker, "One two three")
    read = [reader.feed(Delta("", tokens[:2], 0.1)), reader.feed(Delta("One", tokens[2:], 0.1, "stop"))]
    assert read == [("", ""), ("One", "")]


@pytest.mark.parametrize(
    ("wanted", "prompt", "variables", "first"),
    [
        ("auto", OPEN, {}, True),
        ("auto", QUESTION, {}, False),  # it may think: only the answer shows
        ("auto", CLOSED, {}, False),
        ("deepseek_r1", QUESTION, {}, True),
        ("deepseek_r1", CLOSED, {}, False),
        ("qwen3", QUESTION, {}, True),
        ("qwen3", CLOSED, {"enable_thinking": False}, False),
        ("deepseek_v3", QUESTION, {"thinking": True}, True),
        ("deepseek_v3", QUESTION, {}, False),
    ],
)
def test_grammar_waits_for_thinking_only_where_it_comes(
    thinker: Any, wanted: str, prompt: str, variables: dict[str, Any], first: bool
) -> None:
    assert reader_of(wanted, thinker, prompt, variables).comes_first == first


OWN = {  # what begins and ends the thinking of families with other tags
    "gemma4": ("<|channel>", "thought\n", "<channel|>"),
    "mistral": ("[THINK]", "", "[/THINK]"),
    "seed_oss": ("<seed:think>", "", "</seed:think>"),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("thinks", [True, False])
def test_thinking_between_a_familys_own_tags_is_read_where_nobody_names_its_parser(
    tokenizer: Any, name: str, thinks: bool
) -> None:
    opens, head, closes = OWN[name]
    family = deepcopy(tokenizer)
    family.add_special_tokens({"additional_special_tokens": [opens, closes, "[TOOL_CALLS]"]})
    assert thinking_parser("auto", family) == name
    answer = f"{opens}{head}{THOUGHT}{closes}{ANSWER}" if thinks else ANSWER
    for cuts in (None, (2, 5), ()):
        told = read("auto", family, QUESTION, answer, cuts, enable_thinking=thinks)
        assert told == (THOUGHT if thinks else "", ANSWER)


def test_added_tokens_which_are_listed_slowly_are_listed_once_a_request() -> None:
    added = PropertyMock(return_value={"<table>": 1})
    tokenizer = type("Tokenizer", (), {"is_fast": True, "added_tokens_encoder": added})()
    assert (thinking_parser("auto", tokenizer), added.call_count) == ("", 1)


def test_gpt_oss_is_known_by_its_template(with_template: Any) -> None:
    model = with_template("<|start|>assistant<|channel|>final<|message|>")
    assert thinking_parser("auto", model) == "openai_gptoss"


def test_engine_is_told_of_the_templates_variables() -> None:
    assert vllm_reasoning(Sampling()) == {"reasoning_ended": True}
    told = vllm_reasoning(Sampling(thinks_first={"thinking": True}))
    assert told["reasoning_ended"] is False
    assert told["reasoning_parser_kwargs"] == {"chat_template_kwargs": {"thinking": True}}


def test_model_without_tags_is_not_read(tokenizer: Any, model_dir: Path, thinker: Any) -> None:
    assert thinking_parser("auto", tokenizer) == thinking_parser("none", thinker) == ""
    assert engine_parser("auto", model_dir) == ""


def test_tokenizer_that_no_parser_needs_is_not_loaded(tmp_path: Path) -> None:
    assert engine_parser("none", tmp_path / "no model") == ""


def test_wrong_parser_is_a_clear_error(model_dir: Path, thinking: Path) -> None:
    assert (engine_parser("qwen3", thinking), engine_parser("auto", thinking)) == ("qwen3", "deepseek_r1")
    with pytest.raises(ConfigError, match=r"no reasoning_parser 'qwen_3'; .*did you mean qwen3\?"):
        engine_parser("qwen_3", thinking)
    with pytest.raises(ConfigError, match=r"'deepseek_r1' cannot read this model: .*think"):
        engine_parser("deepseek_r1", model_dir)


def test_slow_tokenizer_is_found_out_before_the_first_answer(tmp_path: Path) -> None:
    slow = ByT5Tokenizer()
    slow.add_tokens(TAGS)
    slow.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"'qwen3' needs a fast tokenizer, .*: set none"):
        engine_parser("qwen3", tmp_path)
    assert engine_parser("auto", tmp_path) == thinking_parser("auto", slow) == ""
