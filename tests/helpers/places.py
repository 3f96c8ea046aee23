"""Where things are that tests look at: this checkout, evaluation data beside it, and a free port."""

from __future__ import annotations

import os
import socket
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
DATA = Path(os.environ.get("TEST_DATA") or ROOT.parent / "shared" / "data")
"""Real questions, traces and dialogues; tests that need them are skipped without."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
