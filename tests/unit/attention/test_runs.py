from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from as_requests import as_requests
from blendrag.attention.runs import Runs, dense_attention, find_runs
from blendrag.attention.scores import Scores

POSITIONS = st.sets(st.integers(0, 80), min_size=1, max_size=60).map(sorted)


def runs_of(positions: list[int]) -> Runs:
    at = np.array(positions)
    return find_runs(at, np.zeros_like(at))


def naive_runs(positions: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][-1] == position - 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    return runs


@given(POSITIONS)
def test_runs_are_found_whole_and_apart(positions: list[int]) -> None:
    found = runs_of(positions)
    runs = naive_runs(positions)
    assert found.count == len(runs)
    edges = found.query_start.tolist()
    assert [positions[a:b] for a, b in itertools.pairwise(edges)] == runs
    assert found.seq_lens.tolist() == [run[-1] + 1 for run in runs]
    assert found.max_query_len == max(map(len, runs))
    assert found.query_start.dtype == found.seq_lens.dtype == np.int32


@given(st.lists(POSITIONS, min_size=1, max_size=5))
def test_sequence_sees_only_its_own_tokens(sequences: list[list[int]]) -> None:
    """Also where one goes on at the very position at which the other ends."""
    positions = np.array([position for each in sequences for position in each])
    numbers = np.array([number for number, each in enumerate(sequences) for _ in each])
    found, alone = find_runs(positions, numbers), [runs_of(each) for each in sequences]
    assert found.seq_lens.tolist() == [length for one in alone for length in one.seq_lens.tolist()]
    assert found.sequences.tolist() == [number for number, one in enumerate(alone) for _ in range(one.count)]
    lengths = [length for one in alone for length in np.diff(one.query_start).tolist()]
    assert np.diff(found.query_start).tolist() == lengths and found.max_query_len == max(lengths)


@given(POSITIONS, st.sampled_from([(1, 1), (4, 2), (3, 1)]), st.integers(0, 9))
def test_runs_as_requests_attend_to_exactly_what_the_dense_mask_allows(
    positions: list[int], heads: tuple[int, int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    n = positions[-1] + 1 + seed  # keys after the last query are there, and seen by nobody
    query = torch.randn(len(positions), heads[0], 8, generator=generator)
    key, value = torch.randn(2, n, heads[1], 8, generator=generator)
    dense = dense_attention(query, key, value, torch.tensor(positions), Scores(0.3))
    expected = as_requests(runs_of(positions), query, key, value, scale=0.3)
    assert dense.shape == query.shape
    torch.testing.assert_close(dense, expected, rtol=1e-4, atol=1e-5)


def test_dense_attention_computes_in_float32() -> None:
    query, key, value = torch.randn(3, 6, 1, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    at = torch.arange(6)
    found = dense_attention(query, key, value, at, Scores(1.0))
    assert found.dtype == torch.float32
    assert found.equal(dense_attention(query.float(), key.float(), value.float(), at, Scores(1.0)))


@given(st.integers(1, 9), st.sampled_from([0.0, 2.0]), st.booleans())
def test_reference_knows_window_cap_and_sinks(window: int, cap: float, with_sinks: bool) -> None:
    """Against the definition, row by row."""
    generator = torch.Generator().manual_seed(window)
    query, key, value = torch.randn(3, 8, 2, 4, generator=generator)
    sinks = torch.randn(2, generator=generator) if with_sinks else None
    found = dense_attention(query, key, value, torch.arange(8), Scores(0.7, window, cap, sinks))
    for row in range(8):
        for head in range(2):
            seen = range(max(0, row - window + 1), row + 1)
            scores = [0.7 * float(query[row, head] @ key[at, head]) for at in seen]
            weights = [math.exp(cap * math.tanh(score / cap) if cap else score) for score in scores]
            total = sum(weights) + (math.exp(sinks[head]) if sinks is not None else 0.0)
            expected = sum(weight / total * value[at, head] for at, weight in zip(seen, weights, strict=True))
            torch.testing.assert_close(found[row, head], expected, rtol=1e-4, atol=1e-5)
