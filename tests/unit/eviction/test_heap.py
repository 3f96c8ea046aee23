from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from blendrag.eviction.heap import IndexedHeap


@given(st.integers(0, 200), st.integers(1, 300), st.randoms(use_true_random=False))
def test_heap_and_a_sorted_dict_always_agree(held: int, priorities: int, rng: random.Random) -> None:
    """Three levels of places; few priorities (many ties) or many."""
    heap = IndexedHeap()
    model: dict[str, tuple[float, int]] = {}

    def push(key: str, turn: int) -> None:
        model[key] = (rng.randrange(priorities), turn)
        heap.push(key, model[key][0])

    for turn in range(held):
        push(f"k{turn}", turn)
    for turn in range(held, held + 150):
        call, key = rng.choice(("push", "remove", "pop")), f"k{rng.randrange(held + 10)}"
        if call == "push":
            push(key, turn)
        elif call == "remove":
            assert heap.remove(key) == model.pop(key, (None, 0))[0]
        elif model:
            first = min(model, key=model.__getitem__)
            assert heap.remove(first) == model.pop(first)[0]
        assert len(heap) == len(model)
        first = min(model, key=model.__getitem__, default="")
        assert heap.peek() == ((first, model[first][0]) if model else None)
        assert (key in heap) == (key in model)
    for key in sorted(model, key=model.__getitem__):
        assert heap.peek() == (key, heap.remove(key))
    assert heap.peek() is None


@given(st.lists(st.integers(0, 9), max_size=400), st.integers(1, 40))
def test_first_wanted_key_is_the_one_that_comes_first(priorities: list[int], every: int) -> None:
    heap = IndexedHeap()
    for turn, priority in enumerate(priorities):
        heap.push(str(turn), priority)
    wanted = [turn for turn in range(len(priorities)) if turn % every == every - 1]
    first = min(wanted, key=lambda turn: (priorities[turn], turn), default=None)
    assert heap.first(lambda key: int(key) in wanted) == (None if first is None else str(first))
