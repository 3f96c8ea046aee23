"""Where things are that tests look at: this checkout, and evaluation data beside it."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
DATA = Path(os.environ.get("TEST_DATA") or ROOT.parent / "shared" / "data")
"""Real questions, traces and dialogues; tests that need them are skipped without."""
