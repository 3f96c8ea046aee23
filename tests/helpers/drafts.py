"""Models that draft, made of the layers of those that they draft for."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def eagle_head(model: Path, folder: Path) -> Path:
    """An untrained one: the model's last layer over its own last states."""
    out = folder / "eagle"
    out.mkdir()
    config = json.loads((model / "config.json").read_text())
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    size = config["hidden_size"]
    config |= {"num_hidden_layers": 1, "tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"]}
    (out / "config.json").write_text(json.dumps(config))
    weights = {
        f"layers.0.{name.removeprefix(last)}": weight
        for name, weight in load_file(model / "model.safetensors").items()
        if name.startswith(last) and not name.endswith("input_layernorm.weight")
    }
    dtype = next(iter(weights.values())).dtype
    weights["fc.weight"] = torch.cat([torch.zeros(size, size), torch.eye(size)], 1).to(dtype)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def add_mtp(folder: Path) -> None:
    """Give a small Qwen 3 Next an untrained head for drafts: its last layer with attention, over its own last
    states."""
    config = json.loads((folder / "config.json").read_text())
    kinds, size = config["layer_types"], config["hidden_size"]
    last = f"model.layers.{len(kinds) - 1 - kinds[::-1].index('full_attention')}."
    weights = load_file(folder / "model.safetensors")
    head = {f"layers.0.{n.removeprefix(last)}": each for n, each in weights.items() if n.startswith(last)}
    norm = weights["model.norm.weight"]
    head |= {f"{n}.weight": norm for n in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    head["fc.weight"] = torch.cat([torch.zeros(size, size), torch.eye(size)], 1).to(norm.dtype)
    made = weights | {f"mtp.{name}": each.clone() for name, each in head.items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
