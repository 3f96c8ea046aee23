"""The interface by which the fused prefill gets stored KV."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch


class StoredLayer(NamedTuple):
    """One layer's stored KV of a prompt's cached tokens: K before RoPE and V, [cached, kv_heads, head_size]
    each, on the device."""

    key: torch.Tensor
    value: torch.Tensor


class StoredLayers(ABC):
    """The stored K and V of a prompt's cached tokens, layer by layer (the paper's ``fetch_kv`` and
    ``synchronize``, its section 6). Use as a context manager: leaving it gives everything back.

    num_layers: how many come, those of a model that drafts behind the model's own.
    """

    num_layers: int

    @abstractmethod
    def fetch_kv(self, first_layer: int, again: Sequence[int] = ()) -> None:
        """Begin to load this layer and those above it, and after those the ones that are needed ``again``,
        ascending. Returns at once; called once."""

    @abstractmethod
    def ready(self, layer: int, wait_s: float = 0.0) -> bool:
        """Return whether :meth:`synchronize` would not have to wait, after waiting so many seconds for the
        layer. Ends the use of the layer before, as :meth:`synchronize` does."""

    @abstractmethod
    def synchronize(self, layer: int) -> StoredLayer:
        """Wait for a layer.

        Layers are asked for in the order of loading; some may be left out. The tensors are the caller's to
        overwrite, until the next call. Raises what loading raised.
        """

    def close(self) -> None:  # noqa: B027  (most have nothing to give back)
        """Stop loading what nobody will ask for."""

    def __enter__(self) -> StoredLayers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SteadyLayers(StoredLayers):
    """Layers of another object, or zeros after its loading has failed. One of several ranks goes on with
    zeros, since the others would wait for it, and all of them are told of ``failure`` at the end.

    shape: [cached, kv_heads, head_size]. like: a tensor of the right type, on the right device.
    """

    def __init__(self, layers: StoredLayers, shape: tuple[int, ...], like: torch.Tensor) -> None:
        self._layers, self._shape, self._like = layers, shape, like
        self.num_layers = layers.num_layers
        self.failure: Exception | None = None

    def fetch_kv(self, first_layer: int, again: Sequence[int] = ()) -> None:
        self._layers.fetch_kv(first_layer, again)

    def ready(self, layer: int, wait_s: float = 0.0) -> bool:
        return self.failure is not None or self._layers.ready(layer, wait_s)

    def synchronize(self, layer: int) -> StoredLayer:
        if self.failure is None:
            try:
                return self._layers.synchronize(layer)
            except Exception as failure:
                self.failure = failure
        return StoredLayer(self._like.new_zeros(self._shape), self._like.new_zeros(self._shape))

    def close(self) -> None:
        self._layers.close()
