"""The reason why an engine did not start, where there was too little memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blendrag.models import weight_files


def shortage(model: Path, arguments: Mapping[str, Any]) -> str | None:
    """Return in what an engine with these arguments exceeds the device's memory, and what to set; None if
    nothing is known before it starts. vLLM itself says it in another process, in words that change."""
    from blendrag.engine.compat.start import memory_plan

    try:
        plan = memory_plan(dict(arguments))
    except Exception:  # then something else keeps the engine from starting
        return None
    weights = sum(file.stat().st_size for file in weight_files(model)) // arguments.get(
        "tensor_parallel_size", 1
    )
    room = plan.share - weights if plan.cache is None else plan.cache
    sizes = f"its weights take {_gib(weights)} of the {_gib(plan.device)} that the device has"
    if room <= 0 or weights > plan.device:
        return f"{sizes}: choose a smaller model, or one with quantised weights"
    of_kv = "kv_cache_memory_bytes" if "kv_cache_memory_bytes" in arguments else "kv_cache_gib"
    if weights + room > plan.device:
        return f"{sizes}, and all KV {_gib(room)}: lower {of_kv}"
    if plan.prompt <= room:
        return None
    more = "gpu_memory_utilization" if plan.cache is None else of_kv
    return (
        f"{sizes}, the KV of one prompt of {plan.window:,} tokens {_gib(plan.prompt)}, and all KV may take"
        f" {_gib(room)}: lower max_model_len, or raise {more}"
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"
