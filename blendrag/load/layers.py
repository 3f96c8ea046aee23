"""What the fused prefill asks of stored KV."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch


class StoredLayers(ABC):
    """Stored K and V of a prompt's cached tokens, layer by layer (the paper's ``fetch_kv`` and
    ``synchronize``, its section 6). Use as a context manager: leaving it gives everything back."""

    @abstractmethod
    def fetch_kv(self, first_layer: int) -> None:
        """Begin to load this layer and those above it. Returns at once; called once."""

    @abstractmethod
    def synchronize(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for a layer: K before RoPE and V, [cached, kv_heads, head_size] each, on the device.

        Layers are asked for in ascending order; some may be left out. The tensors are the caller's to
        overwrite, until the next call. Raises what loading raised.
        """

    def close(self) -> None:  # noqa: B027  (most have nothing to give back)
        """Stop loading what nobody will ask for."""

    def __enter__(self) -> StoredLayers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LayersInMemory(StoredLayers):
    """KV that is in memory already, in chunks of [layers, 2 (K before RoPE, V), tokens, kv_heads,
    head_size]."""

    def __init__(self, chunks: Sequence[torch.Tensor]) -> None:
        self._chunks = chunks

    def fetch_kv(self, first_layer: int) -> None:
        """Nothing to wait for."""

    def synchronize(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (torch.cat([chunk[layer, which] for chunk in self._chunks]) for which in (0, 1))
        return key, value
