"""A LoRA adapter in PEFT's format, with random factors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RANK = 4
_CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "bias": "none", "init_lora_weights": True}


def make_adapter(folder: Path, shapes: Mapping[str, tuple[int, int]], seed: int = 0, **options: Any) -> Path:
    """Of modules with weights [out, in]. options: of PEFT, besides or instead of the usual ones."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(_CONFIG | options))
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for module, (rows, columns) in shapes.items():
        name = f"base_model.model.{module}"
        factors[f"{name}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) / columns**0.5
        factors[f"{name}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) / 4
    save_file(factors, folder / "adapter_model.safetensors")
    return folder
