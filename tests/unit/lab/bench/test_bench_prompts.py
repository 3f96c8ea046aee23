"""The measured prompts."""

from __future__ import annotations

import random
from copy import copy
from typing import Any

import pytest

from blendrag.lab.prompts import Prompt, PromptMaker
from blendrag.prompt.template import decode
from blendrag.store.contexts import Chunk


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
    rng = random.Random(1)
    for number in range(20):
        trial = maker.trial(POOL, 2, rng, number)
        keys, others = ([span[0] for span in p.spans] for p in (trial.prompt, trial.before))
        assert sorted(keys) == sorted(others) and keys != others
        assert len(trial.prompt.token_ids) == len(trial.before.token_ids)


def test_repeats_choose_and_order_anew(maker: PromptMaker) -> None:
    rng = random.Random(0)
    assert len({maker.trial(POOL, 3, rng, number).prompt.spans for number in range(10)}) > 5


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
