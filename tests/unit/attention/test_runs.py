from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendrag.attention.runs import Runs, dense_attention, find_runs, whole_sequences
from blendrag.lab.worker.lmcache import bottom_right

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


def as_requests(
    runs: Runs, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Each run as a backend computes it: the last queries of a causal request over the first keys."""
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    edges = runs.query_start.tolist()
    group = query.shape[1] // key.shape[1]
    for run, length in enumerate(runs.seq_lens.tolist()):
        for row in range(edges[run], edges[run + 1]):
            sees = length - (edges[run + 1] - 1 - row)  # bottom-right aligned
            for head in range(query.shape[1]):
                weights = torch.softmax(key[:sees, head // group] @ query[row, head] * scale, dim=0)
                out[row, head] = weights @ value[:sees, head // group]
    return out


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


@given(POSITIONS, st.integers(0, 9))
def test_bottom_right_mask_leaks_exactly_where_the_selected_are_scattered(
    positions: list[int], after: int
) -> None:
    """Why the mask of the released code is for comparison with it only."""
    m, n = len(positions), positions[-1] + 1 + after
    query, key, one_hot = torch.ones(m, 1, 4), torch.ones(n, 1, 4), torch.eye(n)[:, None]
    at = torch.tensor(positions)
    exact = dense_attention(query, key, one_hot, at, scale=0.5)[:, 0]  # [m, n]: the weight of every key
    both = find_runs(at), bottom_right(at, torch.ones(m, dtype=torch.bool), n)
    runs, leaky = (as_requests(each, query, key, one_hot, 0.5)[:, 0] for each in both)
    future = torch.arange(n)[None, :] > at[:, None]
    assert not exact[future].any() and not runs[future].any()
    assert bool(leaky[future].any()) == (positions != list(range(n - m, n)))


def test_bottom_right_mask_leaks_for_tokens_that_were_not_selected() -> None:
    positions = torch.tensor([0, 1, 4, 6, 9, 10])
    selected = torch.tensor([False, False, True, True, False, False])
    leaky = bottom_right(positions, selected, end=9)
    assert leaky.seq_lens.tolist() == [1, 2, 8, 9, 10, 11]
    assert leaky.query_start.tolist() == list(range(7)) and leaky.max_query_len == 1
    assert leaky.query_start.dtype == leaky.seq_lens.dtype == torch.int32


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
