"""LoRA adapters: which are merged, what with, and that their KV is nobody else's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from blendrag.adapter import Adapter, adapter_for
from blendrag.errors import ModelError, ModelNotFoundError
from blendrag.serving.identity import kv_identity
from blendrag.settings import Settings
from lora_adapter import make_adapter

SHAPES = {"layers.0.q_proj": (12, 8), "layers.0.down_proj": (8, 16)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the weights that ``SHAPES`` names, and one more."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    shapes = {**SHAPES, "layers.0.k_proj": (4, 8)}
    weights = {f"{name}.weight": torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter", SHAPES)


@pytest.mark.parametrize(
    ("options", "scale"), [({}, 2.0), ({"use_rslora": True}, 4.0), ({"lora_alpha": 2}, 0.5)]
)
def test_merged_weights_compute_what_weights_and_factors_do(
    tmp_path: Path, model: Path, options: dict[str, Any], scale: float
) -> None:
    folder = make_adapter(tmp_path / "adapter", SHAPES, **options)
    weights, factors = load_file(model / "model.safetensors"), load_file(folder / "adapter_model.safetensors")
    merged = dict(Adapter(folder).merged(weights.items()))
    assert merged.keys() == weights.keys()
    assert torch.equal(merged["layers.0.k_proj.weight"], weights["layers.0.k_proj.weight"])
    for module, (_, columns) in SHAPES.items():
        a, b = (factors[f"base_model.model.{module}.lora_{each}.weight"] for each in "AB")
        x = torch.randn(5, columns)
        apart = x @ weights[f"{module}.weight"].float().T + scale * (x @ a.T @ b.T)
        torch.testing.assert_close(x @ merged[f"{module}.weight"].T, apart, rtol=1e-4, atol=1e-4)


def test_weights_of_other_names_are_refused_with_an_adapter(adapter: Path) -> None:
    with pytest.raises(ModelError, match=r"is not merged: no layers\.0\.down_proj\.weight"):
        list(Adapter(adapter).merged([("layers.0.q_proj.weight", torch.zeros(12, 8))]))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"peft_type": "IA3"}, "IA3"),
    ],
)
def test_adapter_that_is_more_than_its_factors_is_refused(
    tmp_path: Path, model: Path, options: dict[str, Any], named: str
) -> None:
    folder = make_adapter(tmp_path / "adapter", SHAPES, **options)
    with pytest.raises(ModelError, match=rf"is more than LoRA \(.*{named}.*merge_and_unload"):
        adapter_for(model, str(folder))


def test_adapter_whose_file_has_more_or_less_than_pairs_of_factors_is_refused(
    model: Path, adapter: Path
) -> None:
    file = adapter / "adapter_model.safetensors"
    factors = load_file(file)
    save_file(factors | {"base_model.model.lm_head.weight": torch.zeros(4, 8)}, file)
    with pytest.raises(ModelError, match=r"is more than LoRA \(base_model\.model\.lm_head\.weight\)"):
        adapter_for(model, str(adapter))
    del factors["base_model.model.layers.0.q_proj.lora_B.weight"]
    save_file(factors, file)
    with pytest.raises(ModelError, match="cannot read the adapter"):
        adapter_for(model, str(adapter))
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ModelNotFoundError, match="not a whole safetensors file"):
        adapter_for(model, str(adapter))
    file.unlink()
    with pytest.raises(ModelNotFoundError, match=r"it has no adapter_model\.safetensors"):
        adapter_for(model, str(adapter))


@pytest.mark.parametrize("shapes", [{"layers.1.q_proj": (12, 8)}, {"layers.0.q_proj": (8, 12)}])
def test_adapter_of_another_model_is_refused(
    tmp_path: Path, model: Path, shapes: dict[str, tuple[int, int]]
) -> None:
    folder = make_adapter(tmp_path / "adapter", shapes)
    with pytest.raises(ModelError, match=r"was made for another model .* which has no layers\.\d\.q_proj"):
        adapter_for(model, str(folder))


def test_adapter_is_refused_for_quantised_weights(model: Path, adapter: Path) -> None:
    file = model / "model.safetensors"
    save_file({name: weight.to(torch.int8) for name, weight in load_file(file).items()}, file)
    with pytest.raises(ModelError, match="are quantised, and no adapter is merged"):
        adapter_for(model, str(adapter))


def test_adapter_that_is_not_there_is_a_clear_error(
    model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match=r"no LoRA adapter folder .*; did you mean adapter\?"):
        adapter_for(model, str(adapter.with_name("adaptr")))
    with pytest.raises(
        ModelNotFoundError, match=r"no LoRA adapter 'someone/some-adapter': .* cannot be reached"
    ):
        adapter_for(model, "someone/some-adapter")
    with pytest.raises(
        ModelNotFoundError, match=r"is not a LoRA adapter folder: it has no adapter_config\.json"
    ):
        adapter_for(model, str(model))


def test_kv_of_an_adapter_is_told_from_that_of_the_model_and_of_others(
    tmp_path: Path, model: Path, adapter: Path
) -> None:
    def identity(lora: Path | None) -> Any:
        return kv_identity(Settings.load(model="m", lora=lora and str(lora)), model)

    other = make_adapter(tmp_path / "other", SHAPES, seed=1)
    scaled = make_adapter(tmp_path / "scaled", SHAPES, lora_alpha=16)
    digests = {identity(lora).digest() for lora in (None, adapter, other, scaled)}
    assert len(digests) == 4
    copy = shutil.copytree(adapter, tmp_path / "copy")
    assert identity(copy).digest() == identity(adapter).digest()
    assert identity(adapter).model == f"m with {adapter}", "or an error would say: with m, not m"
