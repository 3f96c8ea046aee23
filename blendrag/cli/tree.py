"""``blendrag tree``: the exact prefixes of an index."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text
from rich.tree import Tree as Picture

from blendrag.cli import options
from blendrag.cli.console import group, interruptible, out, print_json, say, shown

if TYPE_CHECKING:
    from blendrag.tree.tree import Row

app = group(help="Exact prefixes: prompts that begin as earlier ones did (docs/tree.md).")

Questions = Annotated[
    Path, typer.Option("--questions", help="What will be asked, one question per line.", metavar="FILE")
]


@app.command()
def show(index: options.Index = options.DEFAULT_INDEX, json: options.Json = False) -> None:
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
        about = f"{node.end - node.start:,} tokens, {row.nbytes / 2**20:,.1f} MiB, used {row.uses:,} times: "
        branches[node.key] = branches.get(node.parent, picture).add(Text(about + name))
    out().print(picture)


@app.command()
def warm(
    questions: Questions,
    index: options.Index = options.DEFAULT_INDEX,
    model: options.Model = None,
    similarity_top_k: options.SimilarityTopK = None,
    json: options.Json = False,
) -> None:
    """Have the prefixes of questions on disk before they are asked."""
    from blendrag.cli.opening import open_index, start_engine
    from blendrag.errors import ConfigError
    from blendrag.progress import progress_bar

    try:
        asked = [line.strip() for line in questions.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {str(questions)!r}: {error}") from None
    grown = 0
    with open_index(index, model=model) as opened:
        if not opened.settings.tree_stays:
            raise ConfigError("exact prefixes would end with this command: give a disk of tiers tree_bytes")
        start_engine(opened)
        with interruptible("interrupted: what has grown is kept"), progress_bar() as bar:
            bar.note("growing")
            bar.total(len(asked))
            for question in asked:
                grown += opened.warm(question, similarity_top_k)
                bar.advance()
        facts = opened.stats()["tree"]
    if json:
        print_json({"questions": len(asked), "grown": grown, **facts})
        return
    typer.echo(f"{grown:,} nodes grown; {facts['nodes']:,} nodes, {facts['bytes'] / 2**20:,.0f} MiB in all")


@app.command()
def clear(index: options.Index = options.DEFAULT_INDEX) -> None:
    """Remove all exact prefixes from disk. Starts no engine."""
    from blendrag.serving.prefixes import tree_folder
    from blendrag.store.maintenance.closed_index import closed_index

    with closed_index(index) as opened:
        shutil.rmtree(tree_folder(opened.root), ignore_errors=True)
    typer.echo("exact prefixes removed")
