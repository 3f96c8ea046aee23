"""Where things are that tests look at: this checkout, evaluation data beside it, and a free port."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
DATA = Path(os.environ.get("TEST_DATA") or ROOT.parent / "shared" / "data")
"""Real questions, traces and dialogues; tests that need them are skipped without."""


def public(pattern: str) -> Path:
    """The public set that this pattern names, below DATA."""
    found = sorted(DATA.glob(pattern))
    if not found:
        pytest.skip(
            f"needs the public set {pattern}, whose licence keeps it out of this repository: put it into"
            f" {DATA}, or name the folder that has it by the environment variable TEST_DATA"
        )
    return found[0]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
