from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from as_requests import as_requests
from blendrag.attention.runs import dense_attention, find_runs, whole_sequences

POSITIONS = st.sets(st.integers(0, 80), min_size=1, max_size=60).map(sorted)


def naive_runs(positions: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][-1] == position - 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    return runs


@given(POSITIONS)
def test_no_run_is_cut_or_joined_to_the_next(positions: list[int]) -> None:
    found = find_runs(torch.tensor(positions))
    runs = naive_runs(positions)
    assert found.count == len(runs)
    edges = found.query_start.tolist()
    assert [positions[a:b] for a, b in itertools.pairwise(edges)] == runs
    assert found.seq_lens.tolist() == [run[-1] + 1 for run in runs]
    assert found.max_query_len == max(map(len, runs))
    assert found.query_start.dtype == found.seq_lens.dtype == torch.int32


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_sequence_sees_tokens_of_its_neighbour(lengths: list[int]) -> None:
    found, alone = whole_sequences(lengths), [find_runs(torch.arange(n)) for n in lengths]
    assert found.seq_lens.tolist() == [int(one.seq_lens) for one in alone]
    assert found.query_start.diff().tolist() == lengths and found.max_query_len == max(lengths)
    assert found.query_start.dtype == found.seq_lens.dtype == torch.int32


def test_runs_of_nothing_are_not_asked_for() -> None:
    with pytest.raises(AssertionError):
        find_runs(torch.tensor([], dtype=torch.int64))


@given(POSITIONS, st.sampled_from([(1, 1), (4, 2), (3, 1)]), st.integers(0, 9))
def test_runs_as_requests_attend_to_exactly_what_the_dense_mask_allows(
    positions: list[int], heads: tuple[int, int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    n = positions[-1] + 1 + seed  # keys after the last query are there, and seen by nobody
    query = torch.randn(len(positions), heads[0], 8, generator=generator)
    key, value = torch.randn(2, n, heads[1], 8, generator=generator)
    dense = dense_attention(query, key, value, torch.tensor(positions), scale=0.3)
    expected = as_requests(find_runs(torch.tensor(positions)), query, key, value, scale=0.3)
    assert dense.shape == query.shape
    torch.testing.assert_close(dense, expected, rtol=1e-4, atol=1e-5)


def test_dense_attention_is_plain_causal_attention_when_nothing_is_scattered() -> None:
    query, key, value = torch.randn(3, 12, 2, 8, generator=torch.Generator().manual_seed(1))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), is_causal=True, scale=0.5
    ).transpose(0, 1)
    found = dense_attention(query, key, value, torch.arange(12), scale=0.5)
    torch.testing.assert_close(found, expected)


def test_dense_attention_computes_in_float32() -> None:
    query, key, value = torch.randn(3, 6, 1, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    at = torch.arange(6)
    found = dense_attention(query, key, value, at, scale=1.0)
    assert found.dtype == torch.float32
    assert found.equal(dense_attention(query.float(), key.float(), value.float(), at, scale=1.0))
