"""Small models with random weights, in the formats of quantised ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

_GROUP = 64  # columns that share a scale
_BLOCK = 128
_SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.08,  # large enough for attention, and so position, to matter
    "tie_word_embeddings": True,
}


class Format(NamedTuple):
    """config: what ``config.json`` says. tensors: what stands for a weight [out, in], by the ends of its
    names."""

    config: dict[str, Any]
    tensors: Callable[[torch.Tensor], Tensors]


def small_model(folder: Path, tokenizer: Any, quantised: Format | None = None) -> Path:
    """A Llama made in ``folder``, always with the same weights but for their format."""
    import transformers

    torch.manual_seed(0)
    shape = transformers.LlamaConfig(vocab_size=len(tokenizer), **_SMALL)
    transformers.LlamaForCausalLM(shape).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if quantised is not None:
        config, weights = folder / "config.json", folder / "model.safetensors"
        written = json.loads(config.read_text()) | {"quantization_config": quantised.config}
        config.write_text(json.dumps(written))
        save_file(_quantised(load_file(weights), quantised), weights)
    return folder


def _quantised(weights: Tensors, into: Format) -> Tensors:
    made: Tensors = {}
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            stem = name.removesuffix("weight")
            made |= {stem + end: part.contiguous() for end, part in into.tensors(weight.float()).items()}
        else:
            made[name] = weight
    return made


# -- weights -----------------------------------------------------------------------------------------------


def _four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] of 0 to 15, 8 standing for zero, and a scale for each group, [out, groups]."""
    groups = weight.view(weight.shape[0], -1, _GROUP)
    scales = groups.abs().amax(-1, keepdim=True) / 7
    numbers = (groups / scales).round().clamp(-8, 7).int() + 8
    return numbers.view_as(weight), scales.squeeze(-1).bfloat16()


def _packed(numbers: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight numbers of a row in each int32."""
    eights = numbers.long().unflatten(-1, (-1, 8))[..., list(order)]
    return (eights << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)  # wraps around


def _all(number: int, rows: int, columns: int) -> torch.Tensor:
    return _packed(torch.full((rows, columns), number))


def _gptq(weight: torch.Tensor) -> Tensors:
    numbers, scales = _four_bits(weight)
    rows, columns = weight.shape
    return {
        "qweight": _packed(numbers).T,
        "qzeros": _all(7, columns // _GROUP, rows),  # one less than it stands for
        "scales": scales.T,
        "g_idx": torch.arange(columns, dtype=torch.int32) // _GROUP,
    }


def _awq(weight: torch.Tensor) -> Tensors:
    numbers, scales = _four_bits(weight)
    rows, columns = weight.shape
    return {
        "qweight": _packed(numbers.T, (0, 2, 4, 6, 1, 3, 5, 7)),
        "qzeros": _all(8, columns // _GROUP, rows),
        "scales": scales.T,
    }


def _int4(weight: torch.Tensor) -> Tensors:
    numbers, scales = _four_bits(weight)
    return {
        "weight_packed": _packed(numbers),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }


def _int8(weight: torch.Tensor) -> Tensors:
    scales = weight.abs().amax(-1, keepdim=True) / 127
    return {"weight": (weight / scales).round().to(torch.int8), "weight_scale": scales}


def _fp8(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (weight / scales).to(torch.float8_e4m3fn)


def _fp8_whole(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().max() / 448
    return {"weight": _fp8(weight, scale), "weight_scale": scale}


def _fp8_rows(weight: torch.Tensor) -> Tensors:
    scales = weight.abs().amax(-1, keepdim=True) / 448
    return {"weight": _fp8(weight, scales), "weight_scale": scales}


def _fp8_blocks(weight: torch.Tensor) -> Tensors:
    rows, columns = (size // _BLOCK for size in weight.shape)
    blocks = weight.view(rows, _BLOCK, columns, _BLOCK)
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    return {
        "weight": _fp8(blocks, scales).view(weight.shape),
        "weight_scale_inv": scales.view(rows, columns),
    }


# -- formats -----------------------------------------------------------------------------------------------


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    fixed = {"symmetric": True, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": fixed | weights,
        "input_activations": inputs and fixed | inputs,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_BY_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}

FORMATS = {
    "gptq": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False, "sym": True}, _gptq
    ),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True}, _awq),
    "int4": Format(
        _compressed(
            "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": _GROUP}
        ),
        _int4,
    ),
    "int8": Format(
        _compressed(
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": "channel"},
            _BY_TOKEN | {"type": "int"},
        ),
        _int8,
    ),
    "fp8": Format(_FP8, _fp8_whole),
    "fp8 by rows": Format(
        _compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "channel"},
            _BY_TOKEN | {"type": "float"},
        ),
        _fp8_rows,
    ),
    "fp8 by blocks": Format(_FP8 | {"weight_block_size": [_BLOCK, _BLOCK]}, _fp8_blocks),
}
