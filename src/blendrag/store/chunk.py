"""A chunk's record, and the absence of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class Chunk:
    """KV of one chunk of text, prefilled alone.

    kv: [layers, 2 (K before RoPE, V), tokens, kv_heads, head_size], contiguous, on the CPU: a layer's K and V
        are one sequential read.
    """

    key: str
    token_ids: tuple[int, ...]
    kv: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.kv.numel() * self.kv.element_size()


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a chunk could not be had: never stored or evicted, damaged on disk, or made of other tokens."""

    reason: Literal["missing", "damaged", "mismatch"]
