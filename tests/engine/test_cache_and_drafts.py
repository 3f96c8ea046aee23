"""Engines whose KV cache has eight bits, or whose answers are drafted, blend as others do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from blendrag import BlendIndex
from blendrag.errors import ConfigError
from blendrag.lab.doctor import run_doctor
from blendrag.lab.running import lab_engine
from blendrag.settings import Settings
from places import EXAMPLES

pytestmark = [pytest.mark.own_engine, pytest.mark.nightly]

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
needs_avx512 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM keeps KV in eight bits on CPUs with AVX-512 only"
)


def settings(model: Path, **options: Any) -> dict[str, Any]:
    return {"model": str(model), "max_model_len": 3072, "kv_cache_gib": 1, "dtype": "float32", **options}


@needs_avx512
@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2"])
def test_cache_of_eight_bits_blends_to_its_own_full_prefill(model_dir: Path, kind: str) -> None:
    asked = Settings.load(**settings(model_dir, dtype="auto", engine_args={"kv_cache_dtype": kind}))
    report = run_doctor(asked)
    assert report.passed, [row for row in report.rows if not row.ok]


def answers(folder: Path, model: Path, **options: Any) -> list[str]:
    """Of one index, all of them blended; and the same, prefilled plainly."""
    with BlendIndex.open(folder, **settings(model, **options)) as index:
        index.ingest(EXAMPLES / "handbook", progress=False)
        found = []
        for question in ("When is the office in Bergen closed?", "Who approves travel?"):
            blended = index.ask(question, max_tokens=24)
            assert blended.evidence.plain is None and blended.evidence.reused > 0
            found += [blended.text, index.ask(question, max_tokens=24, blend=False).text]
        return found


def test_drafts_change_no_blended_answer(model_dir: Path, tmp_path: Path) -> None:
    head = {"method": "eagle", "model": str(eagle_head(model_dir, tmp_path)), "num_speculative_tokens": 2}
    plain, by_ngram, by_head = (
        answers(tmp_path / str(number), model_dir, engine_args={"speculative_config": each} if each else {})
        for number, each in enumerate((None, NGRAM, head))
    )
    assert plain == by_ngram == by_head


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


def test_measuring_with_drafts_is_refused_in_one_line(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="measure without speculative_config"):
        lab_engine(Settings.load(**settings(model_dir, engine_args={"speculative_config": NGRAM})))


def test_budget_and_drafts_together_are_refused(model_dir: Path, tmp_path: Path) -> None:
    asked = settings(model_dir, kv_budget=256, engine_args={"speculative_config": NGRAM})
    with (
        BlendIndex.open(tmp_path / "index", **asked) as index,
        pytest.raises(ConfigError, match="with drafts is not decoded from a kv_budget"),
    ):
        index.ingest(EXAMPLES / "handbook", progress=False)
