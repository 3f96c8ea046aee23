"""``blendrag stats``: what an index holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from blendrag.cli import options
from blendrag.cli.console import out, print_json, shown


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
    from blendrag.cli.tree import show_tree

    if tree:
        show_tree(index, json)
        return
    with open_index(index, model=model) as opened:
        facts = opened.stats()
    if json:
        print_json(facts)
        return
    chunks = facts["chunks"]
    table = Table(show_header=False, box=None)
    for name, value in (
        ("index", shown(facts["path"])),
        ("model", facts["model"]),
        ("documents", f"{facts['documents']:,}"),
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
    table = Table(title="tiers, since the index was made", title_justify="left", box=None)
    table.add_column("tier", style="bold")
    for column in ("hit ratio", *columns):
        table.add_column(column, justify="right")
    for tier, counts in counters.items():
        asked = counts.get("hits", 0) + counts.get("misses", 0)
        ratio = f"{counts.get('hits', 0) / asked:.1%}" if asked else ""
        table.add_row(Text(tier), ratio, *(f"{counts.get(column, 0):,}" for column in columns))
    return table


def _reuse(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="documents that were reused most", title_justify="left", box=None)
    table.add_column("document", style="bold", overflow="fold")
    for column in ("uses", "chunks", "tokens"):
        table.add_column(column, justify="right")
    for row in rows:
        if row["uses"]:
            numbers = (f"{row[column]:,}" for column in ("uses", "chunks", "tokens"))
            table.add_row(Text(shown(row["owner"])), *numbers)
    return table
