"""Build what is published: a wheel and a source archive of each of the three packages.

    python requirements/dist.py https://forge.example/owner/blendrag [FOLDER]

The URL is the repository's, on the forge that the tag is pushed to: a package index shows a README far from
its files, so its links are made absolute, and the metadata get the addresses of source, manual and issues.
Needs the packages build and twine; ends with an error if an index would refuse anything.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (Path(), *(path.parent.relative_to(ROOT) for path in ROOT.glob("integrations/*/pyproject.toml")))
_LINK = re.compile(r"(!?)(\[[^\]]*\])\(([^)\s:]+)\)")

sys.path.insert(0, str(ROOT))
from blendrag.version import __version__  # noqa: E402  (a file without imports)


def absolute(text: str, folder: Path, url: str) -> str:
    """Return a folder's page whose links into the repository are addresses of this version's files."""

    def address(found: re.Match[str]) -> str:
        picture, label, link = found.groups()
        path, mark, place = link.partition("#")
        path = posixpath.normpath(posixpath.join(folder.as_posix(), path))
        return f"{picture}{label}({url}/{'raw' if picture else 'blob'}/v{__version__}/{path}{mark}{place})"

    return _LINK.sub(address, text)


def urls(url: str) -> str:
    """Return a table of addresses for pyproject.toml."""
    there = f"{url}/blob/v{__version__}"
    lines = {
        "Homepage": url,
        "Documentation": f"{there}/docs/index.md",
        "Changelog": f"{there}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    return "\n[project.urls]\n" + "".join(f'{name} = "{address}"\n' for name, address in lines.items())


def build(folder: Path, url: str, into: Path) -> None:
    """Build the package of a folder, relative to the repository, from a copy of it."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "package"
        tracked = subprocess.check_output(["git", "ls-files", "-z", "."], cwd=ROOT / folder, text=True)
        for name in filter(None, tracked.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / folder / name, copy / name)
        readme, project = copy / "README.md", copy / "pyproject.toml"
        readme.write_text(absolute(readme.read_text(), folder, url))
        project.write_text(project.read_text() + urls(url))
        subprocess.run([sys.executable, "-m", "build", "-o", into, copy], check=True)


def main(url: str, into: Path) -> None:
    for folder in PACKAGES:
        build(folder, url.rstrip("/"), into)
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *sorted(into.iterdir())], check=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else "dist").resolve())
