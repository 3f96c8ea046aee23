"""What a worker of vLLM's has loaded."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch

from blendrag.engine.compat.model import dtype_of


class LoadedWorker(NamedTuple):
    """A worker's model, and what its engine is configured with. ranks: how many share each layer. first: of
    data parallel engines, the first."""

    model: Any
    device: torch.device
    dtype: str
    block_size: int
    ranks: int
    first: bool

    @classmethod
    def of(cls, vllm_config: Any, runner: Any) -> Self:
        parallel = vllm_config.parallel_config
        return cls(
            model=runner.get_model(),
            device=runner.device,
            dtype=str(dtype_of(vllm_config)).removeprefix("torch."),
            block_size=vllm_config.cache_config.block_size,
            ranks=parallel.tensor_parallel_size,
            first=parallel.data_parallel_index == 0,
        )
