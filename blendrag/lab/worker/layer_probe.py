"""Layer by layer, what reuse does to a prompt's KV and to its attention (CacheBlend figures 6, 7 and 8)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from blendrag.engine.worker.chunk_prefill import prefill_chunks
from blendrag.engine.worker.decoder import Decoder, Projected
from blendrag.errors import StoreError
from blendrag.load.loader import LayerLoader, LoadFailedError, LoadSpan
from blendrag.load.trace import Trace
from blendrag.options import BlendOptions
from blendrag.select import Selector, make_selector
from blendrag.select.deviation import squared_deviation, squared_norm
from blendrag.select.interface import CachedTokens
from blendrag.store.kv_store import KVStore
from blendrag.store.record import Miss
from blendrag.store.tiers import Opened

if TYPE_CHECKING:
    from blendrag.engine.worker.data_plane import DataPlane

# Figure 6's curves. ``hkvd`` chooses once, at layer 1, as a blend does; ``hkvd_each`` at every layer anew,
# by that layer's own deviation, which no blend knows: the most that deviation could tell.
CURVES = ("hkvd", "hkvd_each", "first_k", "random")

Span = tuple[str, int, int]  # key, start, length


@torch.inference_mode()
def probe_layers(
    data_plane: DataPlane,
    store: str,
    token_ids: Sequence[int],
    spans: Sequence[Span],
    ratios: Sequence[float],
    queries: int,
) -> dict[str, Any]:
    """Compare a full prefill of the prompt with what is stored of its chunks. Lists of numbers:

    deviation: per metric (``k``, ``v``), layer and cached token, squared L2 distance over the layer's mean
        squared norm.
    attention: per curve (see ``CURVES``), ratio and layer from 1 to the last but one, how far attention is
        from full prefill's: L2 norm of the difference of the attention matrices of the last ``queries``
        tokens (the paper's forward attention deviation) over the norm of full prefill's, mean over heads.
        Both with full prefill's queries; K is full prefill's where a token is recomputed, stored elsewhere.

    Raises StoreError if a chunk's KV is not there.
    """
    decoder, cache = data_plane.model.decoder, data_plane.model.cache
    asking: list[torch.Tensor] = []  # by layer, [queries, heads, head_size], with RoPE

    def look(_: int, projected: Projected) -> None:
        asking.append(projected.query[-queries:].clone())

    (full,) = prefill_chunks(decoder, cache, [token_ids], look=look)
    cached = torch.cat([torch.arange(at, at + length) for _, at, length in spans])
    found: dict[str, list[list[float]]] = {"k": [], "v": []}
    curves = _Curves(decoder, cached, [length for _, _, length in spans], ratios)
    for layer, stored in enumerate(_stored_layers(data_plane.store(store), token_ids, spans)):
        for which, (name, old) in enumerate(zip("kv", stored, strict=True)):
            fresh = full[layer, which]
            distance = squared_deviation(fresh[cached], old)
            found[name].append((distance / squared_norm(fresh)).tolist())
            if name == "v":
                curves.learn(layer, distance)
        if 0 < layer < decoder.num_layers - 1:  # nothing needs the last one's attention
            reused = full[layer, 0].clone()
            reused[cached] = stored[0]
            keys = (full[layer, 0], reused)
            exact, mixed = (_logits(decoder, layer, asking[layer], key.to(cache.device)) for key in keys)
            curves.add(layer, exact, mixed)
    return {"deviation": found, "attention": curves.deviations}


class _Curves:
    """Attention deviation by curve, ratio and layer. ``learn`` of a layer comes before its ``add``."""

    def __init__(
        self, decoder: Decoder, cached: torch.Tensor, lengths: Sequence[int], ratios: Sequence[float]
    ) -> None:
        self._layers, self._cached = decoder.num_layers, cached
        offsets = torch.cat([torch.arange(length) for length in lengths])
        whole = torch.cat([torch.full((length,), length) for length in lengths])
        self._tokens = CachedTokens(offsets, whole, cached.numel())
        self._ratios = ratios
        self._chosen: dict[tuple[str, float], torch.Tensor] = {}
        self.deviations: dict[str, list[list[float]]] = {name: [[] for _ in ratios] for name in CURVES}

    def learn(self, layer: int, distance: torch.Tensor) -> None:
        """This layer's deviation by V, [cached]."""
        tokens = replace(self._tokens, deviation=distance)
        for ratio in self._ratios:
            for name in CURVES:
                selector = self._selector(name, ratio)
                each = name == "hkvd_each" and layer > 0
                if each or layer == selector.check_layers(self._layers)[0]:
                    self._chosen[name, ratio] = selector.select(layer, tokens)

    @staticmethod
    def _selector(name: str, ratio: float) -> Selector:
        return make_selector(BlendOptions(ratio, name.removesuffix("_each")))

    def add(self, layer: int, full: torch.Tensor, reused: torch.Tensor) -> None:
        """This layer's logits by full prefill's K and by K of which the cached part is stored, [heads,
        queries, tokens] each: a logit depends on one key, so any mixture of both is made of these."""
        exact = full.softmax(-1)
        norm = exact.flatten(1).norm(dim=1)
        for name in CURVES:
            for at, ratio in enumerate(self._ratios):
                logits = reused.clone()
                rows = self._cached[self._chosen[name, ratio]].to(logits.device)
                logits[:, :, rows] = full[:, :, rows]
                distance = (logits.softmax(-1) - exact).flatten(1).norm(dim=1)
                self.deviations[name][at].append(float((distance / norm).mean()))


def _logits(decoder: Decoder, layer: int, query: torch.Tensor, raw_key: torch.Tensor) -> torch.Tensor:
    """Of the prompt's last tokens over all keys, [heads, queries, tokens] float32, minus infinity ahead."""
    n, positions = raw_key.shape[0], torch.arange(raw_key.shape[0], device=query.device)
    key = decoder.rotate_keys(layer, positions, raw_key.contiguous().clone()).float()
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scale = decoder.attentions[layer].impl.scale
    logits = torch.einsum("mhd,nhd->hmn", query.float(), key) * scale
    ahead = positions[None, :] > positions[n - query.shape[0] :, None]
    return logits.masked_fill(ahead, float("-inf"))


def _stored_layers(
    kv: KVStore, token_ids: Sequence[int], spans: Sequence[Span]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """K before RoPE and V of the prompt's chunks as they are stored, layer by layer, on the CPU."""
    wanted = [(key, tuple(token_ids[at : at + length])) for key, at, length in spans]
    answers = kv.open_records(wanted)
    opened = [answer for answer in answers if isinstance(answer, Opened)]
    missing = {key: a.reason for (key, _), a in zip(wanted, answers, strict=True) if isinstance(a, Miss)}
    if missing:
        kv.close_records(opened)
        raise StoreError(f"these chunks cannot be compared, their KV is not there: {_reasons(missing)}")
    load = [LoadSpan(one, length) for one, (_, _, length) in zip(opened, spans, strict=True)]
    try:
        with LayerLoader().load(load, kv.layout, torch.device("cpu"), Trace(on=False)) as layers:
            layers.fetch_kv(0)
            for layer in range(kv.layout.num_layers):
                yield layers.synchronize(layer).of_all_heads()
    except LoadFailedError as failure:
        raise StoreError(f"stored KV cannot be compared: {failure}") from failure


def _reasons(missing: Mapping[str, str]) -> str:
    return ", ".join(f"{key[:12]} {reason}" for key, reason in missing.items())
