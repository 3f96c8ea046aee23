"""The demo's documents are real, many enough, and the same every time."""

from __future__ import annotations

from blendrag.cli.demo_documents import demo_documents
from places import ROOT

OURS = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def test_thirty_documents_of_others_or_more_and_not_minutes_of_them() -> None:
    documents = demo_documents()
    assert len(documents) - len(OURS) >= 30
    assert sum(len(document.text) for document in documents) <= 200_000, "our own documentation counts"
    assert len({document.source for document in documents}) == len(documents)


def test_second_run_gives_the_same_documents_in_the_same_order() -> None:
    assert demo_documents() == demo_documents()


def test_what_the_questions_are_about_is_there() -> None:
    sources = {document.source for document in demo_documents()}
    for name in ("typer", "rich", "pypdf", "pydantic", "safetensors", "transformers"):
        assert f"{name}, description" in sources
    assert any(source.endswith("licence") for source in sources)


def test_project_documentation_comes_first() -> None:
    documents = demo_documents()
    assert [document.source for document in documents[: len(OURS)]] == OURS
    assert all(document.text for document in documents)
