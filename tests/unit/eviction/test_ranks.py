"""Keys in the order of their levels and of their age."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

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
