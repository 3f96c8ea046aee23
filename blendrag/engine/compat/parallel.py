"""The ranks of an engine."""

from __future__ import annotations

from typing import Any

from vllm.distributed.parallel_state import get_tp_group

# What an engine may divide besides tensors, and why it then prefills plainly.
_DIVIDED = {
    "pipeline_parallel_size": "pipeline parallel: no rank has all layers, and each waits for another",
    "prefill_context_parallel_size": "context parallel: no rank has all tokens of a prompt",
    "decode_context_parallel_size": "context parallel: no rank has all tokens of a prompt",
    # With dense models, vLLM tells each data parallel engine that it is alone.
    "data_parallel_size": "data parallel experts: all engines take their steps together",
}


def divided_otherwise(parallel_config: Any) -> str | None:
    """Return why the ranks of an engine cannot blend together; None if they can, or if there is only one."""
    for name, reason in _DIVIDED.items():
        if getattr(parallel_config, name) > 1:
            return f"engines of several ranks are blended where these share tensors ({reason})"
    if parallel_config.enable_expert_parallel and parallel_config.world_size > 1:
        return "expert parallel engines are not blended: a rank that blends alone would wait for the others"
    return None


def tensor_group() -> Any:
    """Return vLLM's group of the ranks that share this one's tensors."""
    return get_tp_group()
