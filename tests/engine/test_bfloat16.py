"""The same prompt gives the same answer on an engine in bfloat16, too."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from places import ROOT

pytestmark = [pytest.mark.own_engine, pytest.mark.nightly, pytest.mark.timeout(1500)]


def test_what_holds_in_float32_holds_in_bfloat16() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "engine", ROOT / "tests/engine/test_same_answer.py"],
        cwd=ROOT,
        env=os.environ | {"TESTS_DTYPE": "bfloat16"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
