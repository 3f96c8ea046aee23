"""The dashboard and the alert rules ask for metrics that there are, in queries that Prometheus takes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from places import DOCS

FOLDER = DOCS / "monitoring"
_METRIC = re.compile(r"\b(?:blendrag_\w+|vllm:\w+)")


def queries() -> list[str]:
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def alerts() -> list[str]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule["expr"] for rule in group["rules"]]


def test_metrics_that_are_asked_for_are_those_that_are_counted() -> None:
    counted = set(re.findall(r"^\| `(blendrag_\w+)` \|", (DOCS / "metrics.md").read_text(), re.MULTILINE))
    asked = {name for query in [*queries(), *alerts()] for name in _METRIC.findall(query)}
    assert asked - {"vllm:time_to_first_token_seconds_bucket"} <= counted | {"blendrag_blend_seconds_bucket"}
    assert len(asked) > 10


def test_files_that_are_mounted_are_there() -> None:
    services: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    for service in services.values():
        for volume in service["volumes"]:
            assert (FOLDER / volume.partition(":")[0]).exists(), volume


def test_prometheus_takes_rules_and_queries(tmp_path: Path) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("no promtool here: apt-get install prometheus")
    plain = [query.replace("$__rate_interval", "5m") for query in queries()]
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(plain)]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    for what, file in (
        ("config", FOLDER / "prometheus.yml"),
        ("rules", FOLDER / "alerts.yml"),
        ("rules", tmp_path / "queries.yml"),
    ):
        found = subprocess.run([promtool, "check", what, str(file)], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout + found.stderr
