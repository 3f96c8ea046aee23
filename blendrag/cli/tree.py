"""The exact prefixes of an index: ``stats --tree``, ``gc --tree`` and ``ingest --questions``."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text
from rich.tree import Tree as Picture

from blendrag.cli.console import interruptible, out, print_json, say, shown
from blendrag.errors import ConfigError
from blendrag.progress import progress_bar

if TYPE_CHECKING:
    from blendrag.index.index import BlendIndex
    from blendrag.store.maintenance.closed_index import ClosedIndex
    from blendrag.tree.tree import Row


def show_tree(index: Path, json: bool) -> None:
    """Draw what is on disk: documents behind each other, with sizes and uses. Starts no engine."""
    from blendrag.prompt.plan import preview
    from blendrag.serving.prefixes import tree_folder
    from blendrag.store.maintenance.closed_index import closed_index
    from blendrag.tree.tree import Tree

    with closed_index(index) as opened:
        rows: list[Row] = []
        if (tree := Tree.found(tree_folder(opened.root))) is not None:
            with closing(tree):
                rows = [row for row in tree.rows() if row.stored]
        found = opened.catalogue.entries_of(row.node.document for row in rows)
    texts = {entry.key: preview(entry.text) for entry in found}
    names = {row.node.key: texts.get(row.node.document, "what stands before") for row in rows}
    if json:
        print_json([{**row.to_plain(), "text": names[row.node.key]} for row in rows])
        return
    if not rows:
        say("no exact prefixes on disk: none has grown yet, or no disk of tiers has tree_bytes")
        return
    size = sum(row.nbytes for row in rows)
    picture = Picture(f"{len(rows):,} nodes, {size / 2**20:,.0f} MiB")
    branches = {"": picture}
    for row in rows:
        node, name = row.node, shown(names[row.node.key])
        part = f"{node.end - node.start:,} tokens" if node.start < node.end else "state"  # of a hybrid model
        about = f"{part}, {row.nbytes / 2**20:,.1f} MiB, used {row.uses:,} times: "
        branches[node.key] = branches.get(node.parent, picture).add(Text(about + name))
    out().print(picture)


def read_questions(path: Path) -> list[str]:
    """Read questions, one per line. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from None
    return [line.strip() for line in lines if line.strip()]


def grow_tree(index: BlendIndex, questions: Sequence[str]) -> dict[str, Any]:
    """Grow the prefixes of questions on disk before they are asked. Returns how many are new, and what there
    is."""
    from blendrag.cli.opening import start_engine

    grown = 0
    start_engine(index)
    with interruptible("interrupted: what has grown is kept"), progress_bar() as bar:
        bar.note("growing")
        bar.total(len(questions))
        for question in questions:
            grown += index.warm(question)
            bar.advance()
    return {"questions": len(questions), "grown": grown, **index.stats()["tree"]}


def remove_tree(index: ClosedIndex) -> int:
    """Remove all exact prefixes from disk. Returns their bytes."""
    from blendrag.serving.prefixes import tree_folder

    folder = tree_folder(index.root)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    shutil.rmtree(folder, ignore_errors=True)
    return size
