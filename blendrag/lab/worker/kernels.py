"""One layer of a blend in pieces: the model's own modules, over a scratch cache, as the fused prefill uses
them. ``kernel_times`` times them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from blendrag.attention.runs import find_runs
from blendrag.engine.compat.model import normed
from blendrag.engine.worker.blending import LoadedModel
from blendrag.engine.worker.decoder import Attended, KnownDecoder, Rows
from blendrag.engine.worker.indices import Indices, Ints, upload
from blendrag.engine.worker.paged import Addresses, Places
from blendrag.engine.worker.prompt_forward import CachedSpan, PromptTokens
from blendrag.errors import ModelNotSupportedError
from blendrag.lab.worker.operations import LayerShape
from blendrag.options import BlendOptions
from blendrag.select import make_selector
from blendrag.select.deviation import deviation
from blendrag.select.interface import CachedTokens, budget

Step = Callable[[int], Any]  # of a layer's number


@dataclass(frozen=True, slots=True)
class _Rows:
    """Inputs of one layer's pieces for some of the prompt's tokens. The residual stream is overwritten."""

    positions: Indices
    states: torch.Tensor
    residual: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    addresses: Addresses
    places: Places


class LayerPieces:
    """A layer's work on a prompt of ``tokens`` tokens with stored chunks at ``spans`` (start, length), of
    which ``ratio`` is recomputed: random tokens, the same ones every time."""

    def __init__(
        self,
        model: LoadedModel,
        tokens: int,
        spans: Sequence[tuple[int, int]],
        ratio: float,
    ) -> None:
        """Raises ModelNotSupportedError for a model whose layers run whole."""
        decoder = model.decoder
        if not isinstance(decoder, KnownDecoder):
            raise ModelNotSupportedError(
                f"not measured: the layers of {type(decoder.model).__name__} run whole, not piece by piece"
            )
        self._decoder = decoder
        self.dtype = decoder.dtype
        self._random = torch.Generator().manual_seed(0)
        self.device, self._pages = model.cache.device, model.cache.scratch([tokens])
        self._tokens = PromptTokens.of(range(tokens), [CachedSpan(*span) for span in spans])
        cached = self._tokens.cached
        self._cached = upload(cached, self.device)
        self._selector = make_selector(BlendOptions(ratio, "hkvd"))
        offsets, lengths = (torch.from_numpy(each) for each in (self._tokens.offsets, self._tokens.lengths))
        self._candidates = CachedTokens(offsets, lengths, cached.size)
        chosen = torch.randperm(cached.size, generator=self._random)[: budget(cached.size, ratio)]
        self._all = self._rows(self._tokens.ids)
        self._some = self._rows(self._tokens.computed(chosen.numpy()))
        self._stored_places = self._pages.places(cached)
        stored = (cached.size, *decoder.kv_shape)
        self._stored_key, self._stored_value = self._noise(*stored), self._noise(*stored)
        self._pages.write(0, self._all.places, self._all.key, self._all.value)

    def shape(self) -> LayerShape:
        attention = self._decoder.layers[0].self_attn
        config = self._decoder.vllm_config.model_config.hf_text_config
        at, everywhere = self._some.positions.host, self._all.positions.host
        return LayerShape(
            layers=self._decoder.num_layers,
            tokens=everywhere.size,
            cached=self._tokens.cached.size,
            rows=at.size,
            runs=find_runs(at, np.zeros_like(at)).count,
            pairs_rows=int((at + 1).sum()),
            pairs_all=int((everywhere + 1).sum()),
            hidden=config.hidden_size,
            query=attention.q_size,
            kv=attention.kv_size,
            intermediate=config.intermediate_size,
            itemsize=self._decoder.dtype.itemsize,
        )

    def steps(self) -> dict[str, Step]:
        """Every piece by name; ``_all`` at the end: over all tokens, as at the check layer and below it."""
        some, whole = self._some, self._all
        return {
            "rotate": self._rotate,
            "write_stored": lambda n: self._pages.write(
                n, self._stored_places, self._stored_key, self._stored_value
            ),
            "qkv": lambda n: self._project(n, some),
            "write": lambda n: self._pages.write(n, some.places, some.key, some.value),
            "attention": lambda n: self._attend(n, some),
            "o_proj": lambda n: self._output(n, some.query),
            "mlp": lambda n: self._feed(n, some.states, some.residual),
            "qkv_all": lambda n: self._project(n, whole),
            "write_all": lambda n: self._pages.write(n, whole.places, whole.key, whole.value),
            "attention_all": lambda n: self._attend(n, whole),
            "o_proj_all": lambda n: self._output(n, whole.query),
            "mlp_all": lambda n: self._feed(n, whole.states, whole.residual),
            "select": lambda n: self._select(),
            "gather": lambda n: (whole.query[some.positions.device], whole.residual[some.positions.device]),
            "metadata": lambda n: self._pages.addresses(some.positions.host),
        }

    # -- the pieces, as the fused prefill does them -------------------------------------------------------

    def _rotate(self, layer: int) -> torch.Tensor:
        return self._decoder.rotate_keys(layer, self._cached, self._stored_key)

    def _project(self, layer: int, rows: _Rows) -> Rows:
        """The model's own layer, which ends where attention begins."""
        given = Rows(rows.positions, rows.states, rows.residual)
        return self._decoder.prefill_layer(layer, given, lambda _: Attended(None))

    def _attend(self, layer: int, rows: _Rows) -> torch.Tensor:
        return self._pages.attend(layer, rows.query, rows.addresses)

    def _output(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        projected, _ = self._decoder.layers[layer].self_attn.o_proj(heads.view(heads.shape[0], -1))
        return projected

    def _feed(self, layer: int, states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        block = self._decoder.layers[layer]
        x, _ = normed(block.post_attention_layernorm, states, residual)
        return block.mlp(x)

    def _select(self) -> Indices:
        """Deviation by V, the tokens that deviate most, and their places among all rows."""
        fresh_key, fresh_value = self._all.key[self._cached], self._all.value[self._cached]
        scores, norm = deviation("v", fresh_key, fresh_value, self._stored_key, self._stored_value)
        chosen = self._selector.select(1, replace(self._candidates, deviation=scores, norm=norm))
        kept = self._tokens.computed(chosen.numpy())
        return Indices.of(np.searchsorted(self._all.positions.host, kept), self.device)

    # -- inputs ------------------------------------------------------------------------------------------

    def _rows(self, positions: Ints) -> _Rows:
        attention, m = self._decoder.attentions[0], positions.size
        hidden = self._decoder.vllm_config.model_config.hf_text_config.hidden_size
        return _Rows(
            Indices.of(positions, self.device),
            self._noise(m, hidden),
            self._noise(m, hidden),
            self._noise(m, attention.num_heads, attention.head_size),
            self._noise(m, *self._decoder.kv_shape),
            self._noise(m, *self._decoder.kv_shape),
            self._pages.addresses(positions),
            self._pages.places(positions),
        )

    def _noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random).to(self.device, self._decoder.dtype)
