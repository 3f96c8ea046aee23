"""Layers that keep KV: what they keep of a token, how it is moved, and their attention in our hands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from blendrag.engine.compat.layer_kv import KV, layer_kv, stored_shape
from blendrag.engine.compat.model import norm_behind_rope, rotary_of
from blendrag.engine.forward.indices import upload
from blendrag.engine.forward.rotation import Unrotation
from blendrag.store.identity import HeadShape


@dataclass(frozen=True, slots=True, eq=False)
class Projected:
    """A layer's projections of its rows, [rows, heads or kv_heads, head_size] each. Q and K are with RoPE;
    raw_key: K before RoPE; None if nobody asked for it."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    raw_key: torch.Tensor | None


class KVLayers:
    """Some layers of a model, each with one attention module that keeps KV."""

    def __init__(self, layers: Sequence[Any], attentions: Sequence[Any], vllm_config: Any) -> None:
        self.layers, self.attentions, self.vllm_config = list(layers), list(attentions), vllm_config
        self.kv = [layer_kv(attention) for attention in self.attentions]
        # None: of a layer without positions (NoPE). One that has a module and does not call it is found by
        # running it.
        self.rotaries: list[Any | None] = [rotary_of(layer) for layer in self.layers]
        self._unrotations: dict[int, Unrotation] = {}

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def stored_shape(self) -> HeadShape:
        """Return the shape in which K and V of every layer are stored, (kv_heads, head_size)."""
        shape = stored_shape(self.kv)
        assert shape is not None, "such a model is not blended"
        return shape

    def stored(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> KV:
        """Return a layer's K before RoPE and V as they are stored, [n, *stored_shape] each."""
        return self.kv[layer].stored(self.stored_shape, key, value)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of K and V."""
        return self.vllm_config.model_config.dtype

    def rotate_keys(self, layer: int, positions: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return K before RoPE, [n, kv_heads, head_size], moved to ``positions``. May overwrite it."""
        rotary = self.rotaries[layer]
        if rotary is None:
            return key
        return self.kv[layer].rotate(rotary, positions, key.flatten(1)).view(key.shape)

    @cached_property
    def unrotates(self) -> bool:
        """Return whether :meth:`unrotation` is right for all layers: their RoPE turns pairs of numbers. Waits
        for the device the first time."""
        layers = {id(rotary): layer for layer, rotary in enumerate(self.rotaries)}
        device = next(self.layers[0].parameters()).device
        positions = upload(np.array([0, 1, 5, 77, 500]), device)
        for layer in layers.values():
            shape = 5, *self.kv[layer].key
            key = upload(np.linspace(-1, 1, math.prod(shape), dtype=np.float32), device)
            key = key.view(shape).to(self.dtype)
            back = self.unrotation(layer, positions)(self.rotate_keys(layer, positions, key.clone()))
            if not torch.allclose(back, key, atol=0.05):
                return False
        return True

    def unrotation(self, layer: int, positions: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what takes K at ``positions``, [n], back to K before RoPE."""
        rotary = self.rotaries[layer]
        if rotary is None:
            return lambda key: key
        if id(rotary) not in self._unrotations:
            kv = self.kv[layer]
            learnt = Unrotation.of(partial(kv.rotate, rotary), kv.key[1], self.dtype, positions.device)
            self._unrotations[id(rotary)] = learnt
        return self._unrotations[id(rotary)].at(positions)

    @contextmanager
    def attending(
        self, layers: Iterable[int], attend: Callable[[int, Projected], torch.Tensor]
    ) -> Iterator[None]:
        """Have ``attend`` compute these layers' attention, [rows, heads, size of V], whenever one of them is
        called. A rotary module that its layer does not call is forgotten."""
        layers, raw, own = list(layers), list[torch.Tensor](), True

        def before_rotary(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if own:  # stored K may be moved by the same module
                raw[:] = [(args[2] if len(args) > 2 else kwargs["key"]).clone()]

        def project(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            nonlocal own
            if not raw:
                self.rotaries[layer] = None
                raw.append(key.clone())
            raw_key = self.kv[layer].before_rope(raw.pop(), value)
            if (norm := norm_behind_rope(self.layers[layer])) is not None:
                raw_key = norm(raw_key.float()).to(raw_key.dtype)
            own = False
            try:
                return attend(layer, Projected(query, key, value, raw_key))
            finally:
                own = True

        rotaries = {id(one): one for one in (self.rotaries[layer] for layer in layers) if one is not None}
        with ExitStack() as stack:
            for rotary in rotaries.values():
                hook = rotary.register_forward_pre_hook(before_rotary, with_kwargs=True)
                stack.callback(hook.remove)
            for layer in layers:
                stack.enter_context(self.kv[layer].attending(partial(project, layer)))
            yield
