"""A loader of weights that merges an adapter into them as they are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader

from blendrag.adapter import Adapter

_MERGING = "blendrag_merging"


def merging_loader(adapter: Adapter) -> dict[str, Any]:
    """Return engine arguments with which the adapter is merged into the weights."""
    return {"load_format": _MERGING, "model_loader_extra_config": {"adapter": str(adapter.folder)}}


class _MergingLoader(DefaultModelLoader):
    """vLLM's usual loader with another source of weights."""

    def __init__(self, load_config: Any) -> None:
        self._adapter = Adapter(Path(load_config.model_loader_extra_config["adapter"]))
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config={}))

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self._adapter.merged(super().get_all_weights(model_config, model))


def register() -> None:
    """Register the loader with vLLM, in a process that loads a model."""
    register_model_loader(_MERGING)(_MergingLoader)
