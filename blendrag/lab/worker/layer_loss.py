"""What each layer keeps and loses by an eviction (Ada-KV's figures 3 and 4), at the tokens of an answer.

Nothing is evicted: the tokens of an answer are part of the prompt. Those before them are chosen as eviction
would choose them, and the answer's own queries say what that loses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from blendrag.compress import Observed, Scorer, kept_tokens, make_budget, page_gains
from blendrag.engine.recipe import EvictionOrder
from blendrag.engine.report import Eviction
from blendrag.engine.worker.compression import Compression, Parts, WindowQueries
from blendrag.lab.worker.operations import MEASURED, LayerLoss

if TYPE_CHECKING:
    from blendrag.engine.worker.data_plane import DataPlane


@dataclass(slots=True)
class Study:
    """budgets: as they are written. prompt: tokens before the answer."""

    budgets: Sequence[str]
    prompt: int
    found: list[LayerLoss] = field(default_factory=list)


class LabCompression(Compression):
    """That measures the next prompt instead, while there is a study."""

    study: Study | None = None

    def evict(self, order: EvictionOrder) -> Eviction:
        if self.study is None:
            return super().evict(order)
        try:
            assert self._parts is not None, self.reason
            with torch.inference_mode():
                seen = self._seen.pop(order.request_id)
                assert isinstance(seen, WindowQueries), seen
                self._measure(self._parts, seen, order.block_ids, self.study)
        except Exception as error:
            return Eviction(whole=f"{type(error).__name__}: {error}")
        return Eviction(whole=MEASURED)

    def _measure(self, parts: Parts, seen: WindowQueries, block_ids: list[int], study: Study) -> None:
        size, blocks = parts.pages.block_size, np.array(block_ids[: -(-seen.end // parts.pages.block_size)])
        last = (study.prompt - 1) // size
        layers = [self._observed(parts, seen, blocks, n, True) for n in range(parts.pages.num_layers)]
        outputs = [self._output(n) for n in range(parts.pages.num_layers)]
        observed = study.prompt - seen.first
        weights = [_attention(layer, observed) for layer in layers]
        scored: dict[type[Scorer], torch.Tensor] = {}
        for written in study.budgets:
            budget = make_budget(written)
            pages, scorer = budget.tokens // size - 1, budget.scorer
            if pages >= last:
                continue
            if type(scorer) not in scored:
                each = [scorer.score(_before(layer, observed, study)) for layer in layers]
                scored[type(scorer)] = torch.stack([_scores(own, last * size) for own in each])
            scores = scored[type(scorer)]
            counts = budget.allocator.allocate(page_gains(scores, size), pages) * size
            pairs = [
                _share_and_loss(layer, output, weight, _mask(layer, own, count, last * size))
                for layer, output, weight, own, count in zip(
                    layers, outputs, weights, scores, counts, strict=True
                )
            ]
            kept, lost = zip(*pairs, strict=True)
            study.found.append(LayerLoss(written, list(kept), list(lost)))


def begin_study(data_plane: DataPlane, budgets: Sequence[str], prompt: int) -> None:
    """Of the next prompt with a budget of KV, whose first ``prompt`` tokens are before its answer."""
    assert isinstance(data_plane.compression, LabCompression)
    data_plane.compression.study = Study(budgets, prompt)


def end_study(data_plane: DataPlane) -> list[dict[str, Any]]:
    """What was found, as plain data."""
    compression = data_plane.compression
    assert isinstance(compression, LabCompression) and compression.study is not None
    study, compression.study = compression.study, None
    return [asdict(each) for each in study.found]


def _before(layer: Observed, observed: int, study: Study) -> Observed:
    """As it was when the answer began."""
    assert layer.value is not None
    key, value = layer.key[: study.prompt], layer.value[: study.prompt]
    return replace(layer, query=layer.query[:observed], key=key, value=value)


def _scores(scores: torch.Tensor, tokens: int) -> torch.Tensor:
    """[kv_heads, tokens], of which those that observe stay."""
    stays = scores.new_full((len(scores), max(0, tokens - scores.shape[1])), float("inf"))
    return torch.cat([scores[:, :tokens], stays], 1)


def _mask(layer: Observed, scores: torch.Tensor, counts: torch.Tensor, tokens: int) -> torch.Tensor:
    """[kv_heads, n]: what is left, with all that stands behind the first ``tokens``."""
    mask = torch.zeros(layer.key.shape[1], layer.key.shape[0], dtype=torch.bool)
    mask[:, tokens:] = True
    for head, count in enumerate(counts.tolist()):
        mask[head, kept_tokens(scores[head], count)] = True
    return mask


def _share_and_loss(
    layer: Observed, output: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor
) -> tuple[float, float]:
    assert layer.value is not None
    group = weights.shape[1] // len(kept)
    share = (weights * kept.repeat_interleave(group, 0)).sum(-1).mean()
    mixed = torch.einsum("qhn,nhd->qhd", weights, layer.value.float().repeat_interleave(group, 1))
    norm = (mixed.flatten(1) @ output.float().T).abs().sum(-1)
    lost = eviction_loss(weights, layer.value, output, kept) / norm
    return float(share), float(lost.mean())


def _attention(layer: Observed, observed: int) -> torch.Tensor:
    """The softmax of the answer's queries: [queries, heads, n]."""
    query, n = layer.query[observed:].float(), layer.key.shape[0]
    key = layer.key.float().repeat_interleave(query.shape[1] // layer.key.shape[1], 1)
    products = torch.einsum("qhd,nhd->qhn", query, key) * layer.scale
    later = torch.arange(n) > torch.arange(n - len(query), n)[:, None]
    return products.masked_fill(later[:, None], float("-inf")).softmax(-1)


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
