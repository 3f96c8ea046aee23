"""Docstrings and help are understood where they are read: in an editor's hover, in a terminal."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer

from blendrag.cli.app import app
from blendrag.settings import Settings
from places import ROOT

SOURCES = [*(ROOT / "blendrag").rglob("*.py"), *(ROOT / "integrations").glob("l*/l*_*/**/*.py")]
# First words of answers to a question that only the name asks.
FRAGMENTS = {
    "Also", "As", "At", "Before", "Behind", "By", "For", "From", "In", "Of", "On", "That", "These", "Those",
    "To", "When", "Where", "Which", "Who", "Whose", "With",
}  # fmt: skip


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def first_words(path: Path) -> Iterator[tuple[int, str]]:
    for node in nodes(path):
        for one in body if isinstance(body := getattr(node, "body", None), list) else ():
            if isinstance(one, ast.Expr) and isinstance(text := getattr(one.value, "value", None), str):
                yield one.lineno, text.split(None, 1)[0]


def test_no_docstring_begins_as_a_fragment() -> None:
    found = [(path, line, word) for path in SOURCES for line, word in first_words(path)]
    assert len(found) > 2000, "the test could not tell"
    assert not [f"{path}:{line}: {word}" for path, line, word in found if word.strip(",:;") in FRAGMENTS]


def names_of(path: Path) -> Iterator[str]:
    yield path.stem
    yield path.parent.name
    for node in nodes(path):
        match node:
            case ast.Name(ast_name) | ast.Attribute(attr=ast_name):
                yield ast_name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def test_reference_in_a_docstring_leads_somewhere() -> None:
    known = {name for path in SOURCES for name in names_of(path)}
    found = [
        (path, name.split(".")[-1].removesuffix("()"))
        for path in SOURCES
        for name in re.findall(r":(?:attr|class|data|func|meth|mod):`[~!.]*([\w.]+)`", path.read_text())
    ]
    assert len(found) > 100, "the test could not tell"
    assert not [f"{path}: {name}" for path, name in found if name not in known]


def helps(command: Any, path: str) -> Iterator[tuple[str, str]]:
    for parameter in command.params:
        yield f"{path} {parameter.name}", getattr(parameter, "help", None) or ""
    for name, inner in getattr(command, "commands", {}).items():
        yield from helps(inner, f"{path} {name}")


def test_every_option_and_setting_says_what_it_is() -> None:
    options = dict(helps(typer.main.get_command(app), "blendrag"))
    settings = {name: field.description or "" for name, field in Settings.model_fields.items()}
    assert len(options) > 100, "the test could not tell"
    for name, text in (options | settings).items():
        assert text and text.split()[0] not in FRAGMENTS - {"Where", "Which", "With"}, name
