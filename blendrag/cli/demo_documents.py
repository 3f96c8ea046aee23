"""Documents that the demo reads: the project's own, and what installed packages brought along."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import blendrag
from blendrag.index.loaders import Document
from blendrag.lab.texts import description, licences, package_names

# Together they stay near 60,000 tokens: a minute or two of prefill on two cores. A project's documentation
# grows, so only its beginnings are read, which tell what each document is about.
_TOTAL_CHARACTERS = 200_000
_MAX_CHARACTERS = 6_000
_MOST_OF_THE_PROJECT = 2_500
_FEWEST_CHARACTERS = 600
_LICENCES = 8

# What the demo's questions are about comes first; blendrag depends on all of it.
_ASKED_ABOUT = (
    "typer", "rich", "pypdfium2", "turbohtml", "pydantic", "pydantic-settings", "safetensors",
    "huggingface_hub", "transformers", "chromadb", "sentence-transformers", "platformdirs",
)  # fmt: skip


def demo_documents() -> list[Document]:
    """Return documents in the same order every time; at least 30 wherever blendrag's own dependencies are."""
    found = list(_project_documents())
    room = _TOTAL_CHARACTERS - sum(len(document.text) for document in found)
    installed = package_names()
    first = [name for name in _ASKED_ABOUT if name in installed]
    names = first + [name for name in installed if name not in first]
    for document in (*_licences(names), *_descriptions(names)):
        if len(document.text) <= room:
            room -= len(document.text)
            found.append(document)
    return found


def _project_documents() -> Iterator[Document]:
    """Yield README and docs, when blendrag runs from its repository."""
    root = Path(blendrag.__file__).resolve().parents[1]
    if (root / "pyproject.toml").is_file():
        for path in (root / "README.md", *sorted(root.glob("docs/*.md"))):
            with contextlib.suppress(OSError):
                text = _cut(path.read_text(encoding="utf-8"), _MOST_OF_THE_PROJECT)
                yield Document(text, path.relative_to(root).as_posix())


def _descriptions(names: list[str]) -> Iterator[Document]:
    for name in names:
        text = _cut(description(name))
        if len(text) >= _FEWEST_CHARACTERS:
            yield Document(text, f"{name}, description")


def _licences(names: list[str]) -> Iterator[Document]:
    """Yield a few licences that begin differently: most packages bring one of the same three texts."""
    beginnings: set[str] = set()
    for name in names:
        text = _cut(next(licences(name), ""))
        beginning = text.partition("\n")[0]
        if len(text) >= _FEWEST_CHARACTERS and beginning not in beginnings:
            beginnings.add(beginning)
            yield Document(text, f"{name}, licence")
        if len(beginnings) == _LICENCES:
            return


def _cut(text: str, most: int = _MAX_CHARACTERS) -> str:
    """Return the beginning of a long text, up to the end of a paragraph."""
    if len(text) <= most:
        return text
    end = text.rfind("\n\n", 0, most)
    return text[: end if end > 0 else most]
