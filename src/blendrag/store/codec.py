"""The codec axis: how KV is laid down in a record. One interface, one registry; ``raw`` keeps every bit."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from blendrag.errors import ConfigError


class Codec(ABC):
    """Turns a chunk's KV into named tensors and back. Decoding needs nothing but those tensors."""

    @abstractmethod
    def encode(self, kv: torch.Tensor) -> dict[str, torch.Tensor]:
        """[layers, 2, tokens, kv_heads, head_size] to the tensors of a record (none called token_ids)."""

    @abstractmethod
    def decode(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The inverse, as exact as the codec is."""


class Raw(Codec):
    """KV as the model computed it."""

    def encode(self, kv: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"kv": kv.contiguous()}

    def decode(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return tensors["kv"]


CODECS: dict[str, type[Codec]] = {"raw": Raw}


def make_codec(name: str) -> Codec:
    if name not in CODECS:
        raise ConfigError(f"unknown codec {name!r}; there are {', '.join(sorted(CODECS))}")
    return CODECS[name]()
