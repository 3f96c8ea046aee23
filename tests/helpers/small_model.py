"""Small models with random weights, each made from transformers' own configuration class: what
vLLM makes of it is what users have."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from blendrag.settings import Settings
from mistral_format import as_mistral

_NAMES_ALONE = Path(__file__).with_name("without_images")

_SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,  # large enough for attention, and so position, to matter
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
# Of the logits. A few tokens have most of the chance, as with trained models: else no distance between first
# tokens would tell anything.
_LOGITS_STD = 5.0


@dataclass(frozen=True, slots=True)
class Shape:
    """title: the models that have it. config: transformers' class, with ``options`` over small sizes.
    reason: part of why it is not blended; None: it is. answers: whether it does on the CPU build of vLLM.
    always: whether every run of the tests has it. reader: of one that reads images, too, the class of the
    whole configuration, and the rest of it. mistral: the same of one in Mistral's own format, which is
    DeepSeek V3 in other words."""

    title: str
    config: str
    options: Mapping[str, Any] = field(default_factory=dict)
    reason: str | None = None
    answers: bool = True
    always: bool = False
    reader: tuple[str, Mapping[str, Any]] | None = None
    mistral: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return self.title

    def settings(self, folder: Path, tokenizer: Any) -> Settings:
        """Those of a model of this structure, which is made in ``folder``."""
        import torch
        import transformers

        torch.manual_seed(0)
        options = {**_SMALL, "vocab_size": len(tokenizer), **self.options}
        config = getattr(transformers, self.config)(**options)
        loader: Any = transformers.AutoModelForCausalLM
        if self.reader is not None:
            whole, others = self.reader
            config = getattr(transformers, whole)(text_config=config.to_dict(), **others)
            loader = transformers.AutoModelForImageTextToText
        model = loader.from_config(config)
        if self.reason is None:
            with torch.inference_mode():
                grow = _LOGITS_STD / model(torch.arange(100, 164)[None]).logits.std()
                if options["tie_word_embeddings"]:
                    model.get_decoder().norm.weight += grow - 1  # of weights around 1, or those around 0
                else:
                    model.get_output_embeddings().weight *= grow
        for name, weights in model.named_parameters():
            if self.title == "Qwen 3 VL MoE" and ".experts." in name:  # published with its axes exchanged
                weights.data = weights.data.transpose(1, 2).contiguous()
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if self.mistral is not None:
            as_mistral(folder, self.mistral)
        # The backend of latents that every processor has; others ignore it.
        arguments: dict[str, Any] = {"attention_backend": "CPU_MLA"} if "kv_lora_rank" in self.options else {}
        if any("mamba" in name for name in self.options):  # vLLM's CPU build ends with longer prompts, else
            arguments["enable_prefix_caching"] = False
        return Settings.load(model=str(folder), max_model_len=1024, kv_cache_gib=1, engine_args=arguments)


def provide_torchvision(patch: pytest.MonkeyPatch) -> None:
    """Where torchvision's build for CPUs is not to be had: the names that vLLM imports of it, here and in
    processes that are started. Texts need no more."""
    found = find_spec("torchvision")
    if found is None or _NAMES_ALONE in Path(found.origin or "").parents:  # of a test before
        patch.syspath_prepend(_NAMES_ALONE)
        patch.setenv("PYTHONPATH", f"{_NAMES_ALONE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
