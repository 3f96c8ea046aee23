"""The site that `make docs` has built: nothing in it leads nowhere, and what is made from code is there."""

from __future__ import annotations

from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import typer

from blendrag.cli.app import app
from blendrag.settings import Settings
from places import DOCS, ROOT

pytestmark = pytest.mark.nightly(part="docs")

SITE = ROOT / "build" / "site"


class Page(HTMLParser):
    """What a page links to, the places in it, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.text = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.ids.add(found.get("id") or "")
        self.links += [link for name in ("href", "src") if (link := found.get(name))]

    def handle_data(self, data: str) -> None:
        self.text += data


@cache
def page(path: Path) -> Page:
    return Page(path)


PAGES = sorted(path.stem for path in DOCS.glob("*.md"))


@pytest.mark.parametrize("name", PAGES)
def test_every_link_of_a_page_leads_to_a_file_and_a_place_in_it(name: str) -> None:
    here = SITE / f"{name}.html"
    for link in page(here).links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (here.parent / unquote(parts.path)).resolve() if parts.path not in ("", ".") else here
        target = target / "index.html" if target.is_dir() else target
        assert target.is_file(), link
        if parts.fragment and target.suffix == ".html":
            assert unquote(parts.fragment) in page(target).ids, link


def test_every_command_is_described() -> None:
    shown = page(SITE / "commands.html").text
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert f"blendrag {name}" in shown


def test_docstrings_and_settings_are_there() -> None:
    shown = page(SITE / "reference.html").ids
    assert {
        "langchain_blendrag.ChatBlend.base_url",
        "blendrag.BlendIndex.ask",
        "blendrag.Settings.load",
    } <= shown
    assert not [name for name in shown if "._" in name]
    assert all(name in page(SITE / "configuration.html").text for name in Settings.model_fields)
