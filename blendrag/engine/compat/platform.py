"""The installed vLLM's version, and the platform that it computes on."""

from __future__ import annotations

import logging

from vllm import __version__, envs
from vllm.platforms import current_platform

VLLM_VERSION: str = __version__
LOGGER = logging.getLogger("vllm")  # the parent of all of vLLM's own

# Settings of a KV cache that stores numbers as they are computed.
PLAIN_KV = frozenset({"auto", "float16", "bfloat16"})

# Those of one that stores them in eight bits, K and V of a layer with a scale each.
FP8_KV = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2"})


def is_cpu() -> bool:
    """Return whether vLLM computes on the CPU."""
    return bool(current_platform.is_cpu())


def front_end_in_rust() -> bool:
    """Return whether vLLM's server has its HTTP routes in another program than its plugins."""
    return bool(getattr(envs, "VLLM_USE_RUST_FRONTEND", False))  # from 0.29


def device_name(device: object) -> str:
    """Return a torch device, with the product's name if it is an accelerator."""
    return str(device) if is_cpu() else f"{device} ({current_platform.get_device_name()})"
