"""The kernel over paged caches against float32, by Triton's interpreter or on a GPU; and over latents."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendrag.attention import latent
from blendrag.attention.latent import LatentRows, latent_attention, paged_latent_attention
from blendrag.attention.paged import paged_attention
from blendrag.attention.runs import dense_attention
from blendrag.attention.scores import Scores
from device import DEVICE, needs_kernels
from paged_cache import Cache
from places import ROOT

pytestmark = needs_kernels

SEQUENCES = st.lists(st.sets(st.integers(0, 150), min_size=1, max_size=30), min_size=1, max_size=3)
# Groups that fill a tile, that do not, and of more heads than one has lanes for.
HEADS = st.sampled_from([(1, 1), (4, 2), (3, 1), (14, 2), (70, 1)])


def attended(
    query: torch.Tensor, cache: Cache, positions: torch.Tensor, sequences: torch.Tensor, scores: Scores
) -> torch.Tensor:
    rows = cache.rows(positions, sequences)
    return paged_attention(query.to(DEVICE), cache.key, cache.value, rows, scores).cpu()


@settings(max_examples=40)  # an interpreter is slow
@given(
    SEQUENCES,
    HEADS,
    st.sampled_from([8, 24, 64]),
    st.sampled_from([1, 5, 16]),
    st.sampled_from(["NHD", "HND"]),
    st.sampled_from([None, 1, 7, 64, 200]),
    st.sampled_from([0.0, 1.5]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_rows_see_exactly_the_keys_before_them(
    sets: list[set[int]],
    heads: tuple[int, int],
    size: int,
    block_size: int,
    layout: str,
    window: int | None,
    soft_cap: float,
    with_sinks: bool,
    ascending: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    cache = Cache([max(each) + 1 for each in sets], heads[1], size, block_size, layout, seed)
    positions = torch.tensor([position for each in sets for position in sorted(each)])
    sequences = torch.tensor([line for line, each in enumerate(sets) for _ in each])
    if not ascending:
        order = torch.randperm(positions.numel(), generator=generator)
        positions, sequences = positions[order], sequences[order]
    query = torch.randn(positions.numel(), heads[0], size, generator=generator)
    sinks = torch.randn(heads[0], generator=generator) if with_sinks else None
    scores = Scores(0.3, window, soft_cap, sinks)
    on_device = Scores(0.3, window, soft_cap, None if sinks is None else sinks.to(DEVICE))
    found = attended(query, cache, positions, sequences, on_device)
    assert found.shape == query.shape and found.dtype == query.dtype
    for line, (key, value) in enumerate(cache.whole):
        own = sequences == line
        expected = dense_attention(query[own], key, value, positions[own], scores)
        torch.testing.assert_close(found[own], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        pytest.param(
            torch.bfloat16,
            marks=pytest.mark.skipif(
                DEVICE == "cpu", reason="Triton's interpreter has no bfloat16: runs on a GPU"
            ),
        ),
    ],
)
def test_small_types_lose_only_what_they_round(dtype: torch.dtype) -> None:
    cache = Cache([130], 2, 64, 16, "NHD", 1, dtype)
    positions = torch.arange(3, 130, 4)
    query = torch.randn(positions.numel(), 8, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    found = attended(query, cache, positions, torch.zeros_like(positions), Scores(0.125))
    key, value = cache.whole[0]
    exact = dense_attention(query, key, value, positions, Scores(0.125))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), exact, rtol=0.02, atol=0.01)


def test_query_that_is_a_slice_of_a_wider_one_is_read_as_a_slice() -> None:
    cache, at = Cache([30], 1, 8, 5, "NHD", 6), torch.tensor([4, 29])
    wide = torch.randn(2, 5, 8)
    found = attended(wide[:, 1:3], cache, at, torch.zeros_like(at), Scores(0.3))
    torch.testing.assert_close(found, dense_attention(wide[:, 1:3], *cache.whole[0], at, Scores(0.3)))


def test_kernel_compiles_for_each_gpu_and_fits_it() -> None:
    script = ROOT / "tests" / "helpers" / "compile_kernel.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    made = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    lines = [line.split() for line in made.stdout.splitlines()]
    limits = {"80": 99 << 10, "90": 227 << 10, "gfx942": 64 << 10}  # 99 KiB: of the smaller relatives of 80
    assert {line[0] for line in lines} == set(limits)
    assert all(int(line[3]) <= limits[line[0]] for line in lines), lines
    read = {line[0]: (int(line[4]), int(line[5])) for line in lines if line[1] == "bare" and len(line) > 4}
    if not read:
        pytest.skip("nothing beside Triton's compiler reads what it made")
    # A warp's of 64 keys for the products of 128 lanes: the tensor cores, and not they, are what takes time.
    assert read["80"][0] == read["90"][0] == 0, "registers are spilled"
    assert read["80"][1] <= 600 and read["90"][1] <= 450, read


# -- latents, of which V is a part ----------------------------------------------------------------------

SIZE, WIDTH, SCALE = 24, 16, 0.3


@given(st.integers(1, 40), st.integers(1, 6), st.data())
def test_rows_anywhere_see_what_the_reference_does(tokens: int, heads: int, data: st.DataObject) -> None:
    at = sorted(data.draw(st.sets(st.integers(0, tokens - 1), min_size=1)))
    generator = torch.Generator().manual_seed(tokens)
    key = torch.randn(tokens, SIZE, generator=generator)
    query = torch.randn(len(at), heads, SIZE, generator=generator)
    positions = torch.tensor(at)
    expected = dense_attention(query, key[:, None], key[:, None, :WIDTH], positions, Scores(SCALE))
    found = latent_attention(query, key, positions, SCALE, WIDTH)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_bands_of_rows_and_sequences_in_pages_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    cache, query = (torch.randn(*shape, generator=generator) for shape in ((5, 4, SIZE), (9, 2, SIZE)))
    blocks, places = torch.tensor([3, 3, 3, 3, 1, 1, 1]), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    sequences = [
        LatentRows(torch.tensor([0, 2, 8]), torch.tensor([0, 4, 6]), blocks, places),
        LatentRows(torch.tensor([1, 3, 4, 5, 6, 7]), torch.arange(6), blocks[:6], places.flip(0)[:6]),
    ]
    expected = paged_latent_attention(query, cache, sequences, SCALE, WIDTH)
    one = latent_attention(query[[0, 2, 8]], cache[blocks, places], torch.tensor([0, 4, 6]), SCALE, WIDTH)
    assert expected[[0, 2, 8]].equal(one)
    monkeypatch.setattr(latent, "_SCORES_AT_ONCE", 1)
    torch.testing.assert_close(paged_latent_attention(query, cache, sequences, SCALE, WIDTH), expected)
