"""Keys in the order of their levels and of their age."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from blendrag.eviction.ranks import Ages, RankedChunks

KEYS = st.sampled_from("abcdefgh")
BORDERS = (0.0, 10.0, 30.0, 100.0)


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


@given(st.lists(st.tuples(KEYS, st.integers(0, 60), st.integers(0, 9), st.booleans())))
def test_every_age_is_told_rightly_and_once(calls: list[tuple[str, int, int, bool]]) -> None:
    ages, last, told, now = Ages(BORDERS), dict[str, float](), dict[str, int](), 0.0
    turn = dict[str, int]()
    for number, (key, pause, most, gone) in enumerate(calls):
        now += pause
        if gone:
            ages.remove(key)
            last.pop(key, None)
        else:
            ages.used(key, now)
            last[key], told[key], turn[key] = now, 0, number
        for older, step in ages.aged(now, most):
            assert step == sum(now - last[older] >= border for border in BORDERS) - 1 > told[older]
            told[older] = step
            most -= 1
        assert most >= 0
        late = [k for k in last if sum(now - last[k] >= border for border in BORDERS) - 1 > told[k]]
        assert not (most and late), "there was time left, and yet keys were not told of"
        assert all(ages.step(key) == told[key] for key in last)
        assert ages.oldest() == min(last, key=lambda key: turn[key], default=None)
