"""``bench tree``: the order of documents, and what earlier questions leave in a tree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from blendrag.lab.bench.retrieval import ContextPilotOrder, Retrieval, RetrievedQuestion
from blendrag.lab.bench.tree import held_nodes, plan_of
from blendrag.lab.prompts import Prompt
from blendrag.tree import Node

DOCUMENTS = st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True)


@given(st.lists(DOCUMENTS, min_size=1, max_size=20), st.integers(0, 8))
def test_reordered_documents_are_other_ones_or_begin_as_none_before(
    asked: list[list[int]], capacity: int
) -> None:
    order, before = ContextPilotOrder(capacity), list[tuple[int, ...]]()
    for documents in asked:
        found = order.order(documents)
        assert sorted(found) == sorted(documents)
        begins = {path[: depth + 1] for path in before for depth in range(len(path))}
        if capacity >= 4 * len(asked):  # nothing was forgotten
            moved = next((d for d in range(len(found)) if found[: d + 1] not in begins), len(found))
            assert [*found[moved:]] == [one for one in documents if one not in found[:moved]]
            assert not any((*found[:moved], one) in begins for one in found[moved:])
        before.append(found)


def test_path_that_was_forgotten_is_followed() -> None:
    order = ContextPilotOrder(2)
    assert order.order([1, 2]) == (1, 2)
    assert order.order([2, 1]) == (1, 2)
    assert order.order([3, 4]) == (3, 4)
    assert order.order([2, 1]) == (2, 1)


def test_node_takes_less_than_whole_blocks() -> None:
    path = (Node("a", "", 0, 100), Node("b", "a", 100, 200))  # one block, and two of which it shares one
    twice = [path, path]
    assert held_nodes(twice, 384, "lru", 128) == {"a", "b"}
    assert held_nodes(twice, 383, "lru", 128) == {"a"}
    assert held_nodes([path], 384, "lru", 128) == set()


def test_plan_has_other_tokens_or_chunks_than_the_prompt() -> None:
    prompt = Prompt(tuple(range(20)), (("x", 3, 4), ("y", 7, 2), ("z", 10, 10)))
    plan = plan_of(prompt)
    assert plan.token_ids == prompt.token_ids and plan.spans() == list(prompt.spans)


def test_question_comes_twice_where_each_is_asked_once() -> None:
    asked = tuple(RetrievedQuestion(str(number), (number,)) for number in range(50))
    retrieval = Retrieval(("text",) * 50, asked, tuple(number // 10 for number in range(50)))
    assert sorted(retrieval.stream(50, None, 0), key=lambda q: q.documents) == list(asked)
    drawn = retrieval.stream(500, 1.0, 0)
    assert len(drawn) == 500 and len(set(drawn)) <= 50
