"""A model that thinks, on an engine of its own: what the engine holds to a schema, and from which token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blendrag import BlendIndex
from blendrag.errors import ConfigError

pytestmark = [
    pytest.mark.own_engine,
    pytest.mark.nightly,
    pytest.mark.xdist_group("thinking"),
]

HI = [{"role": "user", "content": "Name an office."}]
SCHEMA = {"type": "object", "properties": {"open": {"type": "boolean"}}, "required": ["open"]}
OFF = {"enable_thinking": False}


@pytest.fixture(scope="module")
def index(
    tmp_path_factory: pytest.TempPathFactory, thinking_dir: Path, engine_options: dict[str, Any]
) -> Iterator[BlendIndex]:
    folder = tmp_path_factory.mktemp("index")
    options = {**engine_options, "model": str(thinking_dir), "min_cached_tokens": 16}
    with pytest.raises(ConfigError, match=r"no reasoning_parser 'qwen_3'; .*did you mean qwen3\?"):
        BlendIndex.open(folder / "wrong", **options, reasoning_parser="qwen_3").start()
    with BlendIndex.open(folder / "index", **options) as opened:
        opened.ingest("The office in Bergen is closed on the second Friday of each month. " * 10)
        yield opened


def test_thinking_that_does_not_end_is_no_answer(index: BlendIndex) -> None:
    answer = index.ask(HI, max_tokens=12)
    assert answer.reasoning and answer.text == ""
    assert (answer.finish_reason, answer.tokens) == ("length", 12)
    plain = index.ask(HI, max_tokens=12, chat_template_kwargs=OFF)
    assert plain.reasoning is None and plain.text


def test_schema_lets_the_model_think_and_is_kept_to(index: BlendIndex) -> None:
    close = index.tokenizer.convert_tokens_to_ids("</think>")
    ends = {"logit_bias": {close: 100.0}}  # the tag, as soon as it is allowed, and as long as it is
    answers = [
        index.ask(HI, schema=SCHEMA, max_tokens=30, other=ends),
        index.ask(HI, schema=SCHEMA, max_tokens=30, chat_template_kwargs=OFF),
    ]
    for answer in answers:
        assert isinstance(json.loads(answer.text)["open"], bool)
    thinking = index.ask(HI, schema=SCHEMA, max_tokens=12)
    assert thinking.reasoning and not thinking.text, "it thinks, and the schema waits"


def test_question_to_documents_is_blended_behind_other_variables(index: BlendIndex) -> None:
    for variables in ({}, OFF):
        answer = index.ask("When is it closed?", max_tokens=4, chat_template_kwargs=variables)
        assert answer.evidence.reused and not answer.evidence.plain
        assert (answer.reasoning is None) == bool(variables)
