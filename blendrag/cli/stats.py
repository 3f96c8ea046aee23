"""``blendrag stats``: what an index holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from rich.tree import Tree as Picture

from blendrag.cli import options
from blendrag.cli.console import out, print_json, say, shown
from blendrag.tables import table_with

if TYPE_CHECKING:
    from blendrag.tree.tree import Row


def stats(
    index: options.Index = options.DEFAULT_INDEX,
    model: options.Model = None,
    tree: Annotated[
        bool, typer.Option("--tree", help="Draw the exact prefixes that are on disk instead.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Show how many documents, chunks and bytes an index holds. Starts no engine."""
    from blendrag.cli.opening import open_index

    if tree:
        _show_tree(index, json)
        return
    with open_index(index, model=model) as opened:
        facts = opened.stats()
    if json:
        print_json(facts)
        return
    chunks, documents = facts["chunks"], f"{facts['documents']:,}"
    if chunks["owners"] and not facts["documents"]:  # the folder of a server, or of a vector store
        documents = f"{chunks['owners']:,} in collections"
    table = Table(show_header=False, box=None)
    for name, value in (
        ("index", shown(facts["path"])),
        ("model", facts["model"]),
        ("documents", documents),
        ("chunks", f"{chunks['chunks']:,} ({chunks['tokens']:,} tokens)"),
        ("with stored KV", f"{chunks['ready']:,} ({chunks['bytes'] / 2**20:,.0f} MiB)"),
        ("still to prefill", f"{chunks['pending']:,}"),
        ("evicted", f"{chunks['evicted']:,}"),
        ("eviction", _eviction(facts["eviction"])),
    ):
        table.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    out().print(table)
    if facts["counters"]:
        out().print(_tiers(facts["counters"]))
    if any(row["uses"] for row in facts["reuse"]):
        out().print(_reuse(facts["reuse"]))


def _eviction(facts: Mapping[str, Any]) -> str:
    """Return the policies by tier, and the forecasts that they were given, in a line."""
    policies, asked = facts["policies"], facts["forecasts"].get("asked", 0)
    named = ", ".join(f"{tier} {policy}" for tier, policy in policies.items()) or "no tier has a limit"
    if not asked:
        return named
    counts = facts["forecasts"]
    became = ", ".join(f"{counts[name]:,} {name}" for name in ("answered", "dropped", "unanswered"))
    return f"{named}; {asked:,} forecasts asked, {became}, {counts['busy_s']:,.1f} s"


def _tiers(counters: Mapping[str, Mapping[str, int]]) -> Table:
    columns = ("hits", "misses", "promotions", "evictions", "errors", "refused", "damaged")
    table = _plain_table("tier", "hit ratio", *columns, title="tiers, since the index was made")
    for tier, counts in counters.items():
        asked = counts.get("hits", 0) + counts.get("misses", 0)
        ratio = f"{counts.get('hits', 0) / asked:.1%}" if asked else ""
        table.add_row(Text(tier), ratio, *(f"{counts.get(column, 0):,}" for column in columns))
    return table


def _reuse(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("uses", "chunks", "tokens")
    table = _plain_table("document", *columns, title="documents that were reused most")
    for row in rows:
        if row["uses"]:
            numbers = (f"{row[column]:,}" for column in columns)
            table.add_row(Text(shown(row["owner"])), *numbers)
    return table


def _plain_table(first: str, *columns: str, title: str) -> Table:
    table = table_with(first, *columns, title=title)
    table.box, table.columns[0].style = None, "bold"
    return table


def _show_tree(index: Path, json: bool) -> None:
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
