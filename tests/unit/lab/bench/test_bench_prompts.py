"""The measured prompts."""

from __future__ import annotations

from copy import copy
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.errors import ConfigError
from blendrag.lab.bench.tree import held_nodes, plan_of
from blendrag.lab.prompts import Prompt, PromptMaker
from blendrag.lab.questions import RetrievedQuestion, question_stream
from blendrag.lab.texts import cut_chunks, installed_texts
from blendrag.prompt.template import decode
from blendrag.store.contexts import Chunk
from blendrag.tree import Node


@pytest.fixture(scope="module")
def maker(tokenizer: Any) -> PromptMaker:
    return PromptMaker(tokenizer, system_prompt="Answer from the texts.", separator="\n\n")


POOL = [Chunk(f"key {i}", "", tuple(range(1000 + 8 * i, 1008 + 8 * i))) for i in range(6)]


def test_spans_point_at_the_chunks(maker: PromptMaker) -> None:
    prompt = maker.make(POOL[:3], "What is it?")
    assert [key for key, _, _ in prompt.spans] == ["key 0", "key 1", "key 2"]
    for chunk, (_, start, length) in zip(POOL, prompt.spans, strict=False):
        assert prompt.token_ids[start : start + length] == chunk.token_ids


def test_prompt_ends_with_the_question_in_the_models_template(maker: PromptMaker, tokenizer: Any) -> None:
    prompt = maker.make(POOL[:2], "What is it?")
    _, start, length = prompt.spans[-1]
    text = decode(tokenizer, prompt.token_ids[start + length :])
    assert text == "\n\nWhat is it?<|im_end|>\n<|im_start|>assistant\n"


def test_model_without_a_template_is_measured_too(tokenizer: Any) -> None:
    class Plain:
        chat_template = None

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, *args: Any, **options: Any) -> Any:
            return tokenizer(*args, **options)

    prompt = PromptMaker(Plain(), system_prompt="Answer.", separator="\n").make(POOL[:2], "What is it?")
    assert len(prompt.spans) == 2 and "<|im_start|>" not in decode(tokenizer, prompt.token_ids)


def test_reordered_prompt_has_the_same_chunks_never_in_the_same_order(maker: PromptMaker) -> None:
    for trial in maker.trials(POOL, 2, 20, seed=1):
        keys, others = ([span[0] for span in p.spans] for p in (trial.prompt, trial.before))
        assert sorted(keys) == sorted(others) and keys != others
        assert len(trial.prompt.token_ids) == len(trial.before.token_ids)


def test_repeats_choose_and_order_anew(maker: PromptMaker) -> None:
    assert len({trial.prompt.spans for trial in maker.trials(POOL, 3, 10, seed=0)}) > 5


def test_prefix_hit_is_not_counted_as_recomputed() -> None:
    prompt = Prompt(tuple(range(30)), (("a", 2, 10), ("b", 14, 10)))
    assert [prompt.chunk_tokens(hit) for hit in (0, 2, 7, 13, 20, 30)] == [20, 20, 15, 10, 4, 0]


def test_something_stands_between_the_chunks_of_a_document(maker: PromptMaker, tokenizer: Any) -> None:
    prompt = maker.make_of([POOL[:2], POOL[2:3], []], "What is it?")
    (_, first, n), (_, second, m), (_, third, _) = prompt.spans
    assert second == first + n
    assert decode(tokenizer, prompt.token_ids[second + m : third]) == "\n\n"
    assert maker.make_of([[chunk] for chunk in POOL], "What?") == maker.make(POOL, "What?")


def test_system_prompt_is_kept_where_the_template_has_no_system_role(tokenizer: Any) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<user>{{ m.content }}</user>{% endfor %}<model>"
    )
    other = copy(tokenizer)
    other.chat_template = template
    prompt = PromptMaker(other, system_prompt="Answer.", separator="\n\n").make(POOL[:1], "What is it?")
    (_, start, length) = prompt.spans[0]
    assert decode(tokenizer, prompt.token_ids[:start]) == "<user>Answer.\n\n"
    assert decode(tokenizer, prompt.token_ids[start + length :]) == "\n\nWhat is it?</user><model>"


# -- where the text comes from --------------------------------------------------------------------------


def encode(text: str) -> list[int]:
    return [ord(sign) for sign in text]


@given(st.lists(st.text("abcd", max_size=40), max_size=8), st.integers(1, 10), st.integers(1, 12))
def test_chunks_are_exact_different_and_from_the_texts(texts: list[str], size: int, most: int) -> None:
    try:
        chunks = cut_chunks(texts, encode, size, least=1, most=most)
    except ConfigError:
        assert all(len(text) < size for text in texts)
        return
    assert len(chunks) == len(set(chunks)) <= most
    assert all(len(chunk) == size for chunk in chunks)
    assert all(any("".join(map(chr, chunk)) in text for text in texts) for chunk in chunks)


def test_every_text_gives_its_first_chunk_before_any_gives_its_second() -> None:
    chunks = cut_chunks(["aabbcc", "xxyy"], encode, 2, least=1, most=4)
    assert ["".join(map(chr, chunk)) for chunk in chunks] == ["aa", "xx", "bb", "yy"]


def test_too_little_text_says_how_much_there_is() -> None:
    with pytest.raises(ConfigError, match="1 different chunks of 2 tokens, and 3 are needed"):
        cut_chunks(["aaaa", "aa", "b"], encode, 2, least=3, most=12)


def test_built_in_text_is_the_same_each_time_and_enough_for_the_default_bench() -> None:
    texts = [text for text in islice(installed_texts(), 150) if len(text) > 4000]
    assert len(texts) >= 6
    assert list(islice(installed_texts(), 20)) == list(islice(installed_texts(), 20))


# -- ``bench tree``: its questions, and what earlier ones leave in a tree -------------------------------


def test_node_takes_whole_blocks() -> None:
    path = (Node("a", "", 0, 100), Node("b", "a", 100, 200))  # one block, and two of which it shares one
    twice = [path, path]
    assert held_nodes(twice, 384, "lru", 128) == {"a", "b"}
    assert held_nodes(twice, 383, "lru", 128) == {"a"}
    assert held_nodes([path], 384, "lru", 128) == set()


def test_plan_has_the_tokens_and_chunks_of_the_prompt() -> None:
    prompt = Prompt(tuple(range(20)), (("x", 3, 4), ("y", 7, 2), ("z", 10, 10)))
    plan = plan_of(prompt)
    assert plan.token_ids == prompt.token_ids and plan.spans == prompt.spans


def test_question_comes_once_where_each_is_asked_once() -> None:
    asked = [RetrievedQuestion(str(number), (number,)) for number in range(50)]
    article = np.arange(50) // 10
    assert sorted(question_stream(asked, article, 50, None, 0), key=lambda q: q.documents) == asked
    drawn = question_stream(asked, article, 500, 1.0, 0)
    assert len(drawn) == 500 and len(set(drawn)) <= 50
