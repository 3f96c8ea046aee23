"""Blending with quantised weights and with a LoRA adapter: small models with random weights, real engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from blendrag.engine.client.generation import Sampling
from blendrag.errors import EngineError
from blendrag.lab.doctor import run_doctor
from blendrag.lab.running import lab_engine
from blendrag.models import model_digest
from blendrag.settings import Settings
from lora_adapter import make_adapter
from quantised_model import FORMATS, small_model

pytestmark = [pytest.mark.own_engine, pytest.mark.nightly]

OTHERS = ["gptq", "awq", "int4", "fp8 by rows"]
REFUSED = {"fp8": "static_scaled_fp8_quant"}
if torch.cpu._is_amx_tile_supported():
    OTHERS.append("fp8 by blocks")
else:
    REFUSED["fp8 by blocks"] = "AMX"

PROMPT = tuple(range(100, 164))


def settings(model: Path, **options: Any) -> Settings:
    return Settings.load(model=str(model), max_model_len=2048, kv_cache_gib=1, **options)


@pytest.mark.parametrize(
    "name", ["int8", *(pytest.param(name, marks=pytest.mark.nightly(part="models")) for name in OTHERS)]
)
def test_quantised_weights_blend_to_full_prefill(tmp_path: Path, tokenizer: Any, name: str) -> None:
    model = small_model(tmp_path / "quantised", tokenizer, FORMATS[name])
    assert model_digest(model) != model_digest(small_model(tmp_path / "original", tokenizer))
    report = run_doctor(settings(model))
    assert report.passed, [row for row in report.rows if not row.ok]


@pytest.mark.nightly(part="models")
@pytest.mark.parametrize(("name", "lacks"), REFUSED.items())
def test_weights_that_vllm_cannot_load_end_in_one_clear_line(
    tmp_path: Path, tokenizer: Any, name: str, lacks: str
) -> None:
    model = small_model(tmp_path / "quantised", tokenizer, FORMATS[name])
    with pytest.raises(EngineError, match=rf"{lacks}.*its weights are quantised \(fp8\)") as caught:
        lab_engine(settings(model))
    assert "\n" not in str(caught.value)


def test_adapter_is_in_what_is_generated_and_blended(tmp_path: Path, tokenizer: Any) -> None:
    import transformers

    model = small_model(tmp_path / "model", tokenizer)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    names = [
        f"model.layers.{layer}.{part}" for layer in (0, 2) for part in ("self_attn.k_proj", "mlp.up_proj")
    ]
    modules = {name: reference.get_submodule(name) for name in names}
    adapter = make_adapter(tmp_path / "lora", {name: module.weight.shape for name, module in modules.items()})
    with_adapter = settings(model, lora=str(adapter), dtype="float32")
    engine = lab_engine(with_adapter)
    try:
        report = run_doctor(with_adapter)
        assert report.passed, [row for row in report.rows if not row.ok]
        answer = engine.generate(PROMPT, Sampling(max_tokens=1, temperature=0.0, logprobs=20))
    finally:
        engine.release()

    def difference() -> float:
        with torch.inference_mode():
            expected = reference(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
        return max(abs(logprob - float(expected[token])) for token, logprob in answer.logprobs[0].items())

    assert difference() > 0.5, "the test sees an adapter that is left out"
    factors = load_file(adapter / "adapter_model.safetensors")
    for name, module in modules.items():
        a, b = (factors[f"base_model.model.{name}.lora_{each}.weight"] for each in "AB")
        product = 2 * (b @ a)  # lora_alpha / r
        module.register_forward_hook(lambda _, x, y, product=product: y + x[0] @ product.T)
    assert difference() < 0.01
