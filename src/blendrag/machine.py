"""What this machine is, as far as times depend on it."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

import blendrag


def describe_machine(model: str, facts: dict[str, Any]) -> dict[str, Any]:
    """JSON-able. ``facts``: the running engine's; ``memory``: bytes; ``commit``: None outside a checkout."""
    import torch
    import transformers
    import vllm
    from vllm.platforms import current_platform

    device = str(facts["device"])
    if not current_platform.is_cpu():
        device = f"{device} ({current_platform.get_device_name()})"
    return {
        **processor(),
        "threads": facts["threads"],
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": device,
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "vllm": vllm.__version__,
        "transformers": transformers.__version__,
        "blendrag": blendrag.__version__,
        "commit": commit(),
        "model": model,
        "dtype": facts["dtype"],
    }


def processor() -> dict[str, Any]:
    """``cpu``: its name; ``cores``: as many as this process may use."""
    return {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0))}


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def commit() -> str | None:
    """The git commit of blendrag's own checkout; where tracked files differ from it, ``+`` and a digest of
    how, so that two states have the same name only if they are the same."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # else it is the checkout of somebody's venv
        changed = git("diff", "HEAD", "--", ".").encode()
        return git("rev-parse", "HEAD") + (f"+{xxhash.xxh3_64_hexdigest(changed)[:8]}" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
