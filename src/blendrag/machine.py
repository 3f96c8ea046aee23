"""What this machine is, as far as times depend on it."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import Any

import blendrag


def describe_machine(model: str, facts: dict[str, Any]) -> dict[str, Any]:
    """JSON-able. ``facts``: the running engine's; ``memory`` in bytes."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    device = str(facts["device"])
    if not current_platform.is_cpu():
        device = f"{device} ({current_platform.get_device_name()})"
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": facts["threads"],
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": device,
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "vllm": vllm.__version__,
        "blendrag": blendrag.__version__,
        "model": model,
        "dtype": facts["dtype"],
    }


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
