"""An engine with a tree, of the tests' own: it reorders its requests, and is killed while it answers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from blendrag import Answer, BlendIndex
from blendrag.engine.client.engine import Engine
from stored_trees import tree_tiers
from workbench import real_texts

pytestmark = [
    pytest.mark.own_engine,
    pytest.mark.nightly,
    pytest.mark.xdist_group("tree-engine"),
]

QUESTION = "What does the package do?"


@pytest.fixture(scope="module")
def index(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, engine_options: dict[str, Any]
) -> Iterator[BlendIndex]:
    own = {"tiers": tree_tiers(1 << 28, 1 << 30), "order": "retrieved:window=8"}
    own |= {"engine_args": engine_options.get("engine_args", {}) | {"max_num_seqs": 1}}
    own |= {"chunk_tokens": 64, "similarity_top_k": 4}
    folder = tmp_path_factory.mktemp("tree")
    with BlendIndex.open(folder / "index", **(engine_options | own)) as opened:
        opened.ingest("\n\n".join(tokenizer.decode(ids) for ids in [*real_texts(tokenizer)][:6]))
        assert opened.warm(QUESTION)
        yield opened


def test_requests_that_overtake_others_get_the_same_answers_and_none_waits_for_ever(
    index: BlendIndex,
) -> None:
    words = ("Why", "When", "Where", "How", "For whom", "Who", "What", "Since when", "What")
    questions = [f"{word} does the package do?" for word in words]
    assert questions[6] == QUESTION

    def ask(question: str) -> Answer:
        return index.ask(question, blend=False, max_tokens=6, timeout=120)

    alone = [ask(question) for question in questions]
    assert index.start().reset_prefix_cache()
    with ThreadPoolExecutor(len(questions)) as threads:
        together = [*threads.map(ask, questions)]
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    for answer in (alone[6], together[6]):
        assert answer.evidence.mode == "exact"


def killed(engine: Any) -> None:
    os.kill(engine._llm.engine_core.resources.engine_manager.processes[0].pid, signal.SIGKILL)


def test_answer_outlives_its_engine_and_so_does_what_the_tree_has_on_disk(index: BlendIndex) -> None:
    """Its rest is that of an answer that nothing happened to, and begins with nodes of the dead engine."""
    options = {"max_tokens": 80, "stop": ["never said"], "other": {"ignore_eos": True}}
    whole = index.ask(QUESTION, **options)
    first, stream, pieces = index.start(), index.stream(QUESTION, **options), list[str]()
    assert isinstance(first, Engine) and whole.evidence.mode == "exact"
    for piece in stream:
        pieces.append(piece)
        if len(pieces) == 12:
            killed(first)
    answer = stream.answer
    assert answer and answer.text == "".join(pieces) == whole.text
    assert (answer.tokens, answer.finish_reason) == (80, "length")
    assert index.start() is not first and not first.alive
    ((reason, given),) = answer.evidence.resumed.items()
    assert "generating" in reason and 12 <= given < 80
    evidence = answer.evidence
    assert evidence.mode == "exact" and set(evidence.tiers) == {"tree disk"}
    assert evidence.exact + evidence.fresh + evidence.prefix == evidence.prompt + given
