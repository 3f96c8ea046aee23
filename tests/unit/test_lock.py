"""The lock files, pyproject and what is installed agree."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, version

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from places import ROOT

# Their builds break `import transformers` beside a CPU build of torch; text models do not need them.
FORBIDDEN = ("torchvision", "torchaudio", "torchcodec")


def read_lock(name: str) -> dict[str, Requirement]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in pins if pin.marker is None or pin.marker.evaluate()}


def pinned(pin: Requirement) -> str:
    (only,) = pin.specifier
    assert only.operator == "==" and not pin.url, f"{pin} is not an exact pin"
    return only.version


CPU, DEV = read_lock("cpu.lock"), read_lock("dev.lock")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


@pytest.mark.parametrize("name", sorted(CPU | DEV))
def test_installed_version_is_the_pinned_one(name: str) -> None:
    assert version(name).partition("+")[0] == pinned((CPU | DEV)[name])


NOT_HERE = {"cuda", "dev"}
RUNTIME = PROJECT["dependencies"] + [
    one for extra in EXTRAS.keys() - NOT_HERE for one in EXTRAS[extra] if not one.startswith("blendrag[")
]


@pytest.mark.parametrize("text", sorted(set(RUNTIME)))
def test_dependency_is_covered_by_the_runtime_lock(text: str) -> None:
    wanted = Requirement(text)
    assert wanted.specifier.contains(pinned(CPU[canonicalize_name(wanted.name)]))


@pytest.mark.parametrize("text", EXTRAS["dev"])
def test_test_tool_is_covered_by_a_lock(text: str) -> None:
    wanted = Requirement(text)
    assert wanted.specifier.contains(pinned((CPU | DEV)[canonicalize_name(wanted.name)]))


@pytest.mark.parametrize("name", FORBIDDEN)
def test_package_that_breaks_transformers_is_neither_pinned_nor_installed(name: str) -> None:
    assert name not in CPU | DEV
    with pytest.raises(PackageNotFoundError):
        version(name)


def test_lock_names_no_registry_and_no_path() -> None:
    for name in ("cpu.lock", "dev.lock"):
        lines = (ROOT / "requirements" / name).read_text().splitlines()
        assert not [
            line for line in lines if not line.startswith("#") and ("/" in line or line.startswith("-"))
        ]
