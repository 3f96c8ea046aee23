"""Small file systems of their own, which are full soon and can be made read-only."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Mount = Callable[..., Callable[[str], None]]


def mounts() -> Iterator[Mount]:
    """Mount a file system of ``size`` on a folder; gives what changes it to "ro" or "rw"."""
    mounted = []

    def run(*command: object) -> None:
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"needs to mount a file system, which only root may: {done.stderr.strip()}")

    def mount(folder: Path, size: str = "4m") -> Callable[[str], None]:
        folder.mkdir(parents=True, exist_ok=True)
        run("mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", folder)
        mounted.append(folder)
        return lambda mode: run("mount", "-o", f"remount,{mode}", folder)

    yield mount
    for folder in reversed(mounted):
        subprocess.run(["umount", "-l", str(folder)], check=True)
