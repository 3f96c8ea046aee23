"""Which names of vLLM's the product imports that a tree of Python files does not have.

``PYTHONPATH=FOLDER python imported_names.py FOLDER``: of the vLLM in a folder, which is not run:
a build for GPUs will do. Members of classes are looked for, too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import blendrag


@dataclass(frozen=True, slots=True)
class Import:
    """A name that is imported from a module; empty for the module itself. where: file and line."""

    module: str
    name: str
    where: str

    def __str__(self) -> str:
        return f"{self.module}{self.name and '.'}{self.name} ({self.where})"

    def is_in(self, tree: Path) -> bool:
        path = _file(tree, self.module)
        if path is None:
            return False
        return (
            not self.name
            or self.name in _names(path)
            or _file(tree, f"{self.module}.{self.name}") is not None
        )


def missing(tree: Path) -> list[str]:
    """Those that ``tree`` has no module or name for, with neither of the ways in which they are tried."""
    root = Path(blendrag.__file__).parent
    return [
        str(ways[0])
        for path in sorted(root.rglob("*.py"))
        for ways in _imported(ast.parse(path.read_text(encoding="utf-8")), str(path.relative_to(root)))
        if not any(each.is_in(tree) for each in ways)
    ]


def _imported(node: ast.AST, file: str) -> Iterator[list[Import]]:
    """Every import of vLLM below a node; one that is tried in several ways, in all of them."""
    if isinstance(node, ast.Try) and node.handlers:
        tried: dict[str, list[Import]] = {}
        for part in (*node.body, *node.handlers):
            for ways in _imported(part, file):
                tried.setdefault(ways[0].name, []).extend(ways)
        yield from tried.values()
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
        yield from ([Import(node.module or "", each.name, f"{file}:{node.lineno}")] for each in node.names)
    elif isinstance(node, ast.Import):
        names = (each.name for each in node.names if each.name.split(".")[0] == "vllm")
        yield from ([Import(name, "", f"{file}:{node.lineno}")] for name in names)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _imported(child, file)


def _file(tree: Path, module: str) -> Path | None:
    path = tree.joinpath(*module.split("."))
    found = (path.with_suffix(".py"), path / "__init__.py")
    return next(filter(Path.is_file, found), None)


@cache
def _names(path: Path) -> frozenset[str]:
    """What a module binds, wherever in it: imports, definitions, assignments, and what its lazy imports
    name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif path.name == "__init__.py" and isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return frozenset(names)


if __name__ == "__main__":
    from blendrag.engine.compat.required import missing as missing_members

    lacking = [*missing(Path(sys.argv[1])), *missing_members()]
    print("\n".join(lacking) or "nothing is missing")
    sys.exit(bool(lacking))
