"""Ada-KV's theorems, on pages of 1, 16 and 32 tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendrag.compress import ALLOCATORS, kept_tokens, page_gains

PAGES = st.sampled_from([1, 16, 32])


def eviction_loss(
    weights: torch.Tensor, value: torch.Tensor, output: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """L1 distance of a layer's attention output before and after eviction, [queries] float32 (Ada-KV,
    Theorem 1).

    weights: [queries, heads, n], softmax over all tokens. value: [n, kv_heads, d]. output: [hidden,
    heads * d], the output projection. kept: [kv_heads, n] bool, some of each head.
    """
    group = weights.shape[1] // value.shape[1]
    left = weights * kept.repeat_interleave(group, 0)
    lost = weights - left / left.sum(-1, keepdim=True)
    mixed = torch.einsum("qhn,nhd->qhd", lost.float(), value.float().repeat_interleave(group, 1))
    return (mixed.flatten(1) @ output.float().T).abs().sum(-1)


def loss_bound(
    weights: torch.Tensor, value: torch.Tensor, output: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """What the loss of the same arguments cannot exceed, [queries]: 2 C times the attention that is evicted
    (Theorem 2), C being the largest norm of a row of V W_O."""
    heads, group = weights.shape[1], weights.shape[1] // value.shape[1]
    parts = output.float().chunk(heads, dim=1)
    largest = max((value[:, h // group].float() @ parts[h].T).abs().sum(-1).max() for h in range(heads))
    evicted = (weights * ~kept.repeat_interleave(group, 0)).sum((1, 2))
    return 2 * largest * evicted


class Layer:
    """One query over random K and V of heads that differ in how sharply they look."""

    def __init__(self, seed: int, kv_heads: int, group: int, n: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        heads, d, hidden = kv_heads * group, 8, 12

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.logits = normal(1, heads, n) * normal(heads, 1).exp()
        self.weights = self.logits.softmax(-1)
        self.value, self.output = normal(n, kv_heads, d), normal(hidden, heads * d)
        self.scores = self.weights[0].unflatten(0, (kv_heads, group)).mean(1)

    def kept(self, counts: torch.Tensor) -> torch.Tensor:
        kept = torch.zeros_like(self.scores, dtype=torch.bool)
        for head, count in enumerate(counts.tolist()):
            kept[head, kept_tokens(self.scores[head], count)] = True
        return kept

    def loss(self, kept: torch.Tensor) -> float:
        return float(eviction_loss(self.weights, self.value, self.output, kept))

    def bound(self, kept: torch.Tensor) -> float:
        return float(loss_bound(self.weights, self.value, self.output, kept))


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    numbers = st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 3), st.integers(64, 200)
    return Layer(*(draw(number) for number in numbers))


@given(layers(), st.integers(1, 64))
def test_loss_is_that_of_a_softmax_over_what_is_kept(layer: Layer, count: int) -> None:
    """Theorem 1."""
    kept = layer.kept(torch.full((len(layer.scores),), count))
    group = layer.weights.shape[1] // len(kept)
    masked = layer.logits.masked_fill(~kept.repeat_interleave(group, 0), float("-inf")).softmax(-1)
    value = layer.value.repeat_interleave(group, 1)
    difference = torch.einsum("qhn,nhd->qhd", layer.weights - masked, value).flatten(1) @ layer.output.T
    assert layer.loss(kept) == pytest.approx(float(difference.abs().sum()), rel=1e-3, abs=1e-4)


@given(layers(), st.data())
def test_loss_is_within_its_bound(layer: Layer, data: st.DataObject) -> None:
    """Theorem 2, whatever is kept."""
    share = data.draw(st.floats(0.01, 1))
    kept = torch.rand(layer.scores.shape, generator=torch.Generator().manual_seed(1)) < share
    kept[:, 0] = True
    assert layer.loss(kept) <= layer.bound(kept) * (1 + 1e-4) + 1e-4
    everything = torch.ones_like(kept)
    assert layer.loss(everything) == pytest.approx(0, abs=1e-3)
    assert layer.bound(everything) == 0


@given(layers(), PAGES, st.integers(1, 2), st.integers(0, 1000))
def test_tokens_that_score_most_have_the_lowest_bound(layer: Layer, page: int, pages: int, seed: int) -> None:
    """Theorem 3, for any other choice of as many."""
    counts = torch.full((len(layer.scores),), page * pages)
    other = torch.zeros_like(layer.scores, dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    for head in other:
        head[torch.randperm(len(head), generator=generator)[: page * pages]] = True
    assert layer.bound(layer.kept(counts)) <= layer.bound(other) + 1e-4


@given(layers(), PAGES, st.integers(1, 2), st.floats(0, 1))
def test_adaptive_budgets_do_not_raise_the_bound(layer: Layer, page: int, pages: int, alpha: float) -> None:
    """Theorem 4: at any alpha, as no head moves past what either of both gives it."""
    gains = page_gains(layer.scores, page)[None]
    found = ALLOCATORS["ada"](alpha).allocate(gains, pages)[0] * page
    uniform = torch.full_like(found, pages * page)
    assert layer.bound(layer.kept(found)) <= layer.bound(layer.kept(uniform)) + 1e-3
