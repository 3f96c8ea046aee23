"""Keys in the order of their levels and of their age."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from blendrag.eviction.heap import IndexedHeap
from blendrag.eviction.ranks import RankedChunks

KEYS = st.sampled_from("abcdefgh")
BORDERS = (0.0, 10.0, 30.0, 100.0)
LEVELS = bytes((2, 3, 1, 0))


@given(st.lists(st.tuples(KEYS, st.one_of(st.none(), st.integers(0, 5)))))
def test_oldest_chunk_of_the_lowest_level_is_first(calls: list[tuple[str, int | None]]) -> None:
    ranks, model = RankedChunks((0.0,)), dict[str, tuple[int, int]]()
    for turn, (key, level) in enumerate(calls):
        if level is None:
            ranks.remove(key)
            model.pop(key, None)
        else:
            ranks.used(key, 1, bytes([level]), float(turn))
            model[key] = level, turn
        assert len(ranks) == ranks.size == len(model)
        assert ranks.least() == min(model, key=lambda key: model[key], default=None)
        assert ranks.oldest() == min(model, key=lambda key: model[key][1], default=None)


@given(st.lists(st.tuples(KEYS, st.integers(0, 60), st.booleans())))
def test_chunks_reach_their_age_a_few_at_a_time(calls: list[tuple[str, int, bool]]) -> None:
    ranks, last, now = RankedChunks(BORDERS), dict[str, float](), 0.0

    def step(key: str) -> int:
        return sum(now - last[key] >= border for border in BORDERS) - 1

    for key, pause, gone in calls:
        now += pause
        if gone:
            ranks.remove(key)
            last.pop(key, None)
        else:
            before = {other: chunk.step for other, chunk in ranks._chunks.items()}
            ranks.used(key, 1, LEVELS, now)
            last[key] = now
            moved = [one for one in before if one != key and ranks._chunks[one].step != before[one]]
            late = [one for one in last if ranks._chunks[one].step != step(one)]
            assert len(moved) <= 4 and all(ranks._chunks[one].step == step(one) for one in moved)
            assert not late or len(moved) == 4, "there was time left, and yet chunks were left behind"
    for _ in range(len(last)):
        last["last"] = now
        ranks.used("last", 1, LEVELS, now)
    assert all(ranks._chunks[key].step == step(key) for key in last)
    if last:
        assert LEVELS[step(ranks.least() or "")] == min(LEVELS[step(key)] for key in last)


# -- a heap of them -------------------------------------------------------------------------------------


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
