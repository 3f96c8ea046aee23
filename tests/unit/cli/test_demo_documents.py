"""The demo's documents are real, many enough, and the same every time."""

from __future__ import annotations

from pathlib import Path

from blendrag.cli.demo_documents import demo_documents
from blendrag.index.loaders import Document


def test_at_least_thirty_documents_and_not_minutes_too_many() -> None:
    texts = [item for item in demo_documents() if isinstance(item, Document)]
    assert len(texts) >= 30
    assert sum(len(document.text) for document in texts) <= 200_000
    assert len({document.source for document in texts}) == len(texts)


def test_second_run_gives_the_same_documents_in_the_same_order() -> None:
    assert demo_documents() == demo_documents()


def test_what_the_questions_are_about_is_there() -> None:
    sources = {item.source for item in demo_documents() if isinstance(item, Document)}
    for name in ("typer", "rich", "pypdf", "pydantic", "safetensors", "transformers"):
        assert f"{name}, description" in sources
    assert any(source.endswith("licence") for source in sources)


def test_project_documentation_comes_first() -> None:
    paths = [item for item in demo_documents() if isinstance(item, Path)]
    assert demo_documents()[: len(paths)] == paths
