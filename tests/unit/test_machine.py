"""What is said of this machine is true, and said where it saves time."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import warnings

import pytest

from blendrag import machine
from blendrag.errors import BlendragWarning

pytestmark = pytest.mark.slow

X86 = platform.machine().lower() in ("x86_64", "amd64")


@pytest.mark.parametrize(("capability", "slow"), [("default", True), ("avx2", True), ("avx512", False)])
def test_cpu_is_mistaken_for_one_that_computes_16_bit(capability: str, slow: bool) -> None:
    code = "from blendrag.machine import emulates_16_bit; print(emulates_16_bit())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{slow and X86}\n", "others have their own instructions for it"


@pytest.mark.parametrize(
    ("dtype", "slow", "told"),
    [("bfloat16", True, True), ("float16", True, True), ("float32", True, False), ("bfloat16", False, False)],
)
def test_user_is_not_told_what_would_be_faster_or_told_for_nothing(
    dtype: str, slow: bool, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "emulates_16_bit", lambda: slow)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        machine.warn_of_emulation(dtype)
    assert [(one.category, "BLENDRAG_DTYPE=float32" in str(one.message)) for one in caught] == (
        [(BlendragWarning, True)] if told else []
    )


def test_user_of_a_command_is_shown_a_line_of_our_source() -> None:
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
