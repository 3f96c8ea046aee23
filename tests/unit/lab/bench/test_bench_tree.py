"""``bench tree``: its questions, and what earlier ones leave in a tree."""

from __future__ import annotations

import numpy as np

from blendrag.lab.bench.tree import held_nodes, plan_of
from blendrag.lab.prompts import Prompt
from blendrag.lab.questions import RetrievedQuestion, question_stream
from blendrag.tree import Node


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
