"""What blendrag makes of models of vLLM's, without an engine.

In a process of its own, since vLLM's groups of ranks are global: ``python bound_models.py OUT FOLDER...``
writes a line of JSON for each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from blendrag.lab.doctor import Check, DoctorReport

_BLOCK_SIZE, _BLOCKS, _TOKENS = 128, 16, 1500
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}


def bound(folders: Sequence[Path], out: Path) -> list[DoctorReport]:
    """Of the models in these folders. Of one that can be blended, its mask is checked, and that the weights
    are found which its attention is followed by."""
    command = [sys.executable, __file__, str(out), *map(str, folders)]
    done = subprocess.run(command, env={**os.environ, **_QUIET}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in out.read_text().splitlines()]
    return [DoctorReport(**{**each, "rows": tuple(Check(**row) for row in each["rows"])}) for each in found]


def main(out: str, *folders: str) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs

    from blendrag.models import query_scaling

    torch.accelerator.empty_cache = lambda: None  # vLLM's loader calls it; a build for CPUs refuses
    with tempfile.TemporaryDirectory() as meeting, Path(out).open("w") as lines:
        for number, folder in enumerate(folders):
            scaling = query_scaling(Path(folder))
            arguments = EngineArgs(
                folder,
                max_model_len=1024,
                enforce_eager=True,
                language_model_only=True,
                hf_overrides=scaling,
                attention_backend="CPU_MLA",  # that of latents which every processor has; others ignore it
            )
            config = arguments.create_engine_config()
            config.cache_config.block_size = _BLOCK_SIZE
            with set_current_vllm_config(config):
                if not number:
                    init_distributed_environment(1, 0, f"file://{meeting}/ranks", 0, "gloo")
                ensure_model_parallel_initialized(1, 1)  # its groups are others for experts
                print(json.dumps(asdict(_report(config))), file=lines, flush=True)
                destroy_model_parallel()


def _report(config: Any) -> DoctorReport:
    from vllm.model_executor.model_loader import get_model

    from blendrag.engine.compat.groups import groups_of_runner
    from blendrag.engine.compat.model import leave_rows_whole, output_weight
    from blendrag.engine.compat.unsupported import unsupported_reason
    from blendrag.engine.forward.decoders import make_decoder
    from blendrag.engine.forward.paged import PagedCache
    from blendrag.engine.worker.selfcheck import mask_error, unfit_reason
    from blendrag.lab.worker.selfcheck import attention_of, layers_of

    model = get_model(vllm_config=config)
    runner = SimpleNamespace(attn_groups=_groups(config))
    name = type(model).__name__
    leave_rows_whole(model)
    if reason := unsupported_reason(config, runner, model):
        return DoctorReport("", name, (), reason, exact=config.model_config.is_hybrid)
    decoder = make_decoder(model, config)
    cache = PagedCache(decoder.attentions, runner, groups_of_runner(runner))
    if reason := unfit_reason(decoder, cache):
        return DoctorReport("", name, (), reason)
    error = mask_error(decoder, cache, _TOKENS, share=0.25)
    of_heads = [] if cache.latent else zip(decoder.layers, decoder.attentions, strict=True)
    lost = [output_weight(*each) is None for each in of_heads]
    rows = (
        Check("mask", str(error), "0.01", error <= 0.01),
        Check("no output projection", str(sum(lost)), "0", not any(lost)),
    )
    return DoctorReport("", name, rows, layers=layers_of(decoder), attention=tuple(attention_of(decoder)))


def _groups(config: Any) -> list[list[Any]]:
    """As vLLM's model runner has them, but with blocks of one size: those of layers with windows apart, each
    divided by the shape of KV and by heads."""
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
    from vllm.v1.core.kv_cache_utils import unify_hybrid_kv_cache_specs

    from blendrag.engine.compat.states import CAN_FAIL

    layers = config.compilation_config.static_forward_context
    attentions = {
        name: each
        for name, each in layers.items()
        if isinstance(each, Attention | MLAAttention)
        and getattr(each, "kv_sharing_target_layer_name", None) is None
    }
    by_kind: dict[type, dict[tuple[int, int, int], list[str]]] = {}
    specs = {name: each.get_kv_cache_spec(config) for name, each in attentions.items()}
    if not CAN_FAIL:  # then vLLM is given a connector that wants it so
        unify_hybrid_kv_cache_specs(specs)
    for name, each in attentions.items():
        of_heads = (each.num_kv_heads, _BLOCK_SIZE, 2 * each.head_size)
        of_block = (_BLOCK_SIZE, each.head_size) if isinstance(each, MLAAttention) else of_heads
        each.kv_cache = torch.zeros((_BLOCKS, *of_block), dtype=config.model_config.dtype)
        by_shape = by_kind.setdefault(type(specs[name]), {})
        by_shape.setdefault((each.num_heads, each.num_kv_heads, each.head_size), []).append(name)

    def group(names: list[str]) -> Any:
        spec = specs[names[0]]
        builder = CPUAttentionMetadataBuilder(spec, names, config, torch.device("cpu"))
        return SimpleNamespace(
            kv_cache_spec=spec,
            layer_names=names,
            get_metadata_builder=lambda *_: builder,
        )

    return [[group(names) for names in by_shape.values()] for by_shape in by_kind.values()]


if __name__ == "__main__":
    main(*sys.argv[1:])
