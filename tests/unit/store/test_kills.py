"""kill -9 at random moments (see killed.py and killed_nodes.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forked import Forked

KILLED = "import runpy; runpy.run_module('{}', run_name='__main__')"


@pytest.mark.parametrize("kind", ["unlimited", "limited"])
@pytest.mark.parametrize("kills", [30, pytest.param(100, marks=pytest.mark.nightly(part="large"))])
def test_no_kill_costs_what_was_acknowledged_or_leaves_anything_behind(
    tmp_path: Path, kind: str, kills: int
) -> None:
    """Of ingest, and of eviction: nothing half-written, no orphan, nothing missing, at any restart."""
    process = Forked(KILLED.format("killed"), tmp_path / "index", kills, kind, 0)
    counts = json.loads(process.finished(300))
    print(counts)
    assert counts["acknowledged"] > kills / 2  # it was killed at work
    assert counts["deleted"] > kills / 20
    assert counts["left to be cleaned up"] > 0
    assert (counts.get("evicted", 0) > 0) == (kind == "limited")


@pytest.mark.parametrize("kind", ["unlimited", "limited"])
@pytest.mark.parametrize("kills", [30, pytest.param(100, marks=pytest.mark.nightly(part="large"))])
def test_no_kill_breaks_a_path_or_costs_a_node_that_was_stored(tmp_path: Path, kind: str, kills: int) -> None:
    """While nodes are saved, or leave with a document."""
    process = Forked(KILLED.format("killed_nodes"), tmp_path / "index", kills, kind, 0)
    counts = json.loads(process.finished(300))
    print(counts)
    assert counts["put"] > kills / 2 and counts["deleted"] > kills / 20
