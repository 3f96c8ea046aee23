"""The three packages as users install them: wheels of this checkout, in fresh environments, by pip and by uv.

    python tests/helpers/fresh_install.py

Says whether an index would take what is published, that README runs in an empty folder, what a client
weighs, that it works, with a server of this checkout, and with the oldest packages that it promises, too, and
that what others install resolves beside it. Takes some minutes, and packages from where pip takes them. Ends
with an error at the first thing that fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from email import message_from_bytes
from pathlib import Path

from packaging.requirements import Requirement

from served import Server

ROOT = Path(__file__).parents[2]
CLIENTS = {  # what is installed, the framework that it is for, and what of client_walk.py it does
    "blendrag": (None, ["blendrag"]),
    "langchain-blendrag": ("langchain-core", ["blendrag", "langchain_blendrag"]),
    "llama-index-llms-blendrag": ("llama-index-core>=0.14", ["blendrag", "llama_index"]),
}
URL = "https://forge.example/owner/blendrag"
MAX_MB = 40  # that a client downloads beside its framework
NEIGHBOURS = ("deepeval>=4", "litellm[proxy]>=1.100", "open-webui>=0.12")


def run(*command: str | Path, stdin: str = "", cwd: Path | None = None) -> str:
    ended = subprocess.run(
        [str(word) for word in command],
        input=stdin,
        cwd=cwd,
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    if ended.returncode:
        sys.exit(f"{' '.join(map(str, command))}:\n{ended.stdout}{ended.stderr}")
    return ended.stdout


def mb(files: Iterable[Path]) -> float:
    return sum(file.stat().st_size for file in files if not file.is_symlink() and file.is_file()) / 1e6


class Workshop:
    """A folder with what this checkout would publish, and environments."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.wheels = folder, folder / "wheels"
        tools = self.environment("tools")
        self.uv = tools.with_name("uv")
        self.pip("install", "build", "twine", "uv", python=tools)
        run(tools, ROOT / "requirements" / "dist.py", URL, self.wheels)

    def environment(self, name: str) -> Path:
        run(sys.executable, "-m", "venv", self.folder / name)
        return self.folder / name / "bin" / "python"

    def pip(self, *words: str | Path, python: Path | str = sys.executable) -> None:
        run(python, "-m", "pip", "-qq", "--disable-pip-version-check", *words)

    def downloaded(self, package: str) -> list[Path]:
        """Return what pip downloads for a package."""
        into = self.folder / "downloads" / Requirement(package).name
        self.pip("download", "--find-links", self.wheels, "-d", into, package)
        return list(into.iterdir())


def published(files: Path) -> None:
    """Check that a wheel has the files that git has, and that all links of its page are absolute."""
    wheels = sorted(files.glob("*.whl"))
    assert len(wheels) == len(sorted(files.glob("*.tar.gz"))) == len(CLIENTS)
    for path in wheels:
        name = path.name.partition("-")[0].replace("_", "-")
        folder = ROOT if name == "blendrag" else ROOT / "integrations" / name
        with zipfile.ZipFile(path) as wheel:
            names = wheel.namelist()
            (about,) = (wheel.read(name) for name in names if name.endswith(".dist-info/METADATA"))
        code = {name for name in names if ".dist-info/" not in name}
        (top,) = {name.partition("/")[0] for name in code}
        assert code == set(run("git", "ls-files", top, cwd=folder).split()), path.name
        assert any(name.endswith("licenses/LICENSE") for name in names), path.name
        said = message_from_bytes(about)
        assert len(said.get_all("Project-URL") or []) == 4 and said["License-Expression"] == "Apache-2.0"
        assert not re.findall(r"\]\((?!https://)", str(said.get_payload())), path.name
    with tarfile.open(next(files.glob("blendrag-*.tar.gz"))) as source:
        inside = {name.partition("/")[2] for name in source.getnames()}
    assert {"LICENSE", "README.md", "blendrag/version.py", "pyproject.toml"} <= inside


def readme(shop: Workshop) -> None:
    """Run README's program and commands in an empty folder, from the wheels. All other packages are those of
    this environment, which are the lock files'."""
    python, folder = shop.environment("readme"), shop.folder / "empty"
    shop.pip("install", "--no-deps", *shop.wheels.glob("*.whl"), python=python)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "locked.pth").write_text(sysconfig.get_path("purelib"))
    (folder / "docs").mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "quickstart.md", folder / "docs")
    where = run(python, "-c", "import blendrag, langchain_blendrag; print(blendrag.__file__)", cwd=folder)
    assert where.startswith(str(site)), where
    text = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    print(run(python, "-", stdin=program, cwd=folder).strip())
    for line in re.findall(r"^(blendrag (?:ingest|ask|serve) .*)$", text, re.MULTILINE):
        shown = " --print" if line.startswith("blendrag serve") else ""  # and is not left running
        run("sh", "-c", f"{python.parent}/{line}{shown}", cwd=folder)
        print(f"ran in an empty folder: {line}")


def walk(python: Path, walks: list[str], url: str) -> None:
    """Do what a client does, with a scripted server and with a real one."""
    run(python, ROOT / "tests" / "helpers" / "client_walk.py", *walks)
    run(python, ROOT / "tests" / "helpers" / "client_asks.py", url, *walks)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of a server with an engine."""
    server = Server(folder)
    try:
        yield str(server.wait().client.base_url)
    finally:
        server.end()


def oldest(package: Path) -> list[str]:
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(line) for line in project["dependencies"]]
    floors = {one.name: spec.version for one in wanted for spec in one.specifier if spec.operator == ">="}
    return [f"{name}=={version}" for name, version in floors.items() if name != "blendrag"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, served(Path(folder) / "kv") as url:
        shop = Workshop(Path(folder))
        published(shop.wheels)
        readme(shop)
        row = "{:<28} {:>9} {:>12} {:>18} {:>13}"
        print(row.format("client", "packages", "download MB", "beside framework", "installed MB"))
        for package, (framework, walks) in CLIENTS.items():
            files = shop.downloaded(package)
            beside = mb(files) - (mb(shop.downloaded(framework)) if framework else 0)
            python = shop.environment(package)
            before = mb(python.parents[1].rglob("*"))
            shop.pip("install", "--no-index", "--find-links", files[0].parent, package, python=python)
            installed = mb(python.parents[1].rglob("*")) - before
            print(row.format(package, len(files), f"{mb(files):.0f}", f"{beside:.0f}", f"{installed:.0f}"))
            assert beside <= MAX_MB, package
            walk(python, walks, url)

            by_uv = [shop.uv, "pip", "install", "-q", "--find-links", shop.wheels, "--python"]
            python = shop.environment(f"{package}-uv")
            run(*by_uv, python, package)
            walk(python, walks, url)
            python = shop.environment(f"{package}-oldest")
            floors = oldest(ROOT) + (oldest(ROOT / "integrations" / package) if framework else [])
            run(*by_uv, python, package, *floors)
            walk(python, walks, url)
        for neighbour in NEIGHBOURS:
            wanted = "\n".join((*CLIENTS, "blendrag[cli,redis,s3]", neighbour))
            run(shop.uv, "pip", "compile", "-q", "--find-links", shop.wheels, "-", stdin=wanted)
            print(f"resolves beside {neighbour}")


if __name__ == "__main__":
    main()
