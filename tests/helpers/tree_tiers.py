"""Settings of indexes that keep exact prefixes beside chunks."""

from __future__ import annotations

from typing import Any


def tree_tiers(ram: int = 0, disk: int = 0) -> list[dict[str, Any]]:
    """Return the default tiers, with so many bytes for exact prefixes in them."""
    return [
        {"kind": "ram", "bytes": 2 << 30, "tree_bytes": ram},
        {"kind": "disk", "tree_bytes": disk},
    ]
