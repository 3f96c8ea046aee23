"""kill -9 at random moments (see killed.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stores import start

KILLED = "import runpy; runpy.run_module('killed', run_name='__main__')"
KILLS = 100  # of each kind


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unlimited", "limited"])
def test_no_kill_costs_what_was_acknowledged_or_leaves_anything_behind(tmp_path: Path, kind: str) -> None:
    """Of ingest, and of eviction: nothing half-written, no orphan, nothing missing, at any restart."""
    process = start(KILLED, tmp_path / "index", KILLS, kind, 0)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    counts = json.loads(output)
    print(counts)
    assert counts["acknowledged"] > KILLS  # it was killed at work
    assert counts["deleted"] > KILLS / 10
    assert counts["left to be cleaned up"] > 0
    assert (counts.get("evicted", 0) > 0) == (kind == "limited")
