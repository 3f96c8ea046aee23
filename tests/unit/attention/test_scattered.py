"""The kernel for CPUs over paged caches against float32, and what happens where it cannot be had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendrag.attention import scattered
from blendrag.attention.runs import dense_attention
from blendrag.attention.scattered import Room, ScatteredRows, scattered_attention, takes, why_not
from blendrag.attention.scores import Scores
from device import needs_cpu_kernel

LENGTH = 700  # more keys than a tile of rows reads at once
HEADS = st.sampled_from([(1, 1), (4, 2), (3, 1), (14, 2)])


class Pages:
    """A sequence in blocks in random order, the numbers of a page in another one. All else is NaN: reading it
    shows."""

    def __init__(self, kv_heads: int, size: int, block: int, seed: int, length: int = LENGTH) -> None:
        generator = torch.Generator().manual_seed(seed)
        count = -(-length // block)
        self.blocks = torch.randperm(count + 2, generator=generator)[:count].int()
        self.order = torch.randperm(2 * block * size, generator=generator).view(2, block, size)
        padded = torch.full((count + 2, kv_heads + 1, block, 2 * size), torch.nan).bfloat16()
        self.cache = padded[:, :kv_heads]
        self.whole = torch.randn(2, length, kv_heads, size, generator=generator).bfloat16()
        pages = padded.flatten(2)
        at = torch.arange(length)
        for part, order in zip(self.whole, self.order, strict=True):
            places = order[at % block][:, None].expand(-1, kv_heads, -1)
            block_of = self.blocks.long()[at // block][:, None, None].expand_as(places)
            pages[block_of, torch.arange(kv_heads)[:, None].expand_as(places), places] = part

    def rows(self, positions: torch.Tensor) -> ScatteredRows:
        return ScatteredRows(positions, self.blocks, self.order.int(), Room())


@needs_cpu_kernel
@settings(max_examples=25, deadline=None)
@given(
    st.sets(st.integers(0, LENGTH - 1), min_size=1, max_size=80),
    HEADS,
    st.sampled_from([16, 48, 64, 80, 128]),
    st.sampled_from([16, 32, 48]),
    st.sampled_from([None, 1, 7, 64, 600]),
    st.booleans(),
    st.integers(0, 99),
)
def test_rows_see_exactly_the_keys_before_them(
    positions: set[int],
    heads: tuple[int, int],
    size: int,
    block: int,
    window: int | None,
    ascending: bool,
    seed: int,
) -> None:
    at = torch.tensor(sorted(positions))
    pages = Pages(heads[1], size, block, seed, int(at[-1]) + 1)
    if not ascending:
        at = at[torch.randperm(len(at))]
    query = torch.randn(len(at), heads[0], size, generator=torch.Generator().manual_seed(seed)).bfloat16()
    scores = Scores(size**-0.5, window)
    found = scattered_attention(query, pages.cache, pages.rows(at), scores)
    expected = dense_attention(query, *pages.whole, at, scores)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.01, atol=0.01)


@needs_cpu_kernel
@pytest.mark.parametrize("window", [None, 300])
def test_row_has_the_same_result_whatever_rows_it_is_computed_with(window: int | None) -> None:
    pages, generator = Pages(2, 64, 32, 5), torch.Generator().manual_seed(5)
    at = torch.randperm(LENGTH, generator=generator)[:100].sort().values
    query = torch.randn(100, 6, 64, generator=generator).bfloat16()
    scores = Scores(0.125, window)
    whole = scattered_attention(query, pages.cache, pages.rows(at), scores)
    for some in (torch.arange(100)[::3], torch.arange(17), torch.randperm(100, generator=generator)):
        part = scattered_attention(query[some], pages.cache, pages.rows(at[some]), scores)
        assert part.equal(whole[some])


def test_scores_and_numbers_that_the_kernel_does_not_know_are_left_to_the_backend() -> None:
    plain = Scores(0.125, 9)
    assert takes(64, torch.bfloat16, plain)
    assert not takes(64, torch.float32, plain) and not takes(72, torch.bfloat16, plain)
    assert not takes(64, torch.bfloat16, None)
    assert not takes(64, torch.bfloat16, Scores(0.125, soft_cap=30.0))
    assert not takes(64, torch.bfloat16, Scores(0.125, sinks=torch.zeros(4)))


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder with nothing in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    scattered._kernel.cache_clear()
    yield tmp_path / "blendrag"
    scattered._kernel.cache_clear()


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_it_is_said_why(
    compiler: str, nothing_built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(scattered, "has_bf16_products", lambda: True)
    assert compiler in (why_not.__wrapped__() or "")
    assert not list(nothing_built.iterdir())


@needs_cpu_kernel
def test_kernel_is_not_taken_from_where_others_may_write(nothing_built: Path) -> None:
    nothing_built.mkdir()
    nothing_built.chmod(0o770)
    assert str(nothing_built) in (why_not.__wrapped__() or "")


@needs_cpu_kernel
def test_kernel_is_compiled_once(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not.__wrapped__() is None
    (built,) = nothing_built.iterdir()
    assert nothing_built.stat().st_mode & 0o777 == 0o700
    scattered._kernel.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert why_not.__wrapped__() is None and [*nothing_built.iterdir()] == [built]
