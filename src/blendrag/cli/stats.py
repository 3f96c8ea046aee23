"""``blendrag stats``: what an index holds."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from blendrag.cli import options
from blendrag.cli.console import out, print_json, shown


def stats(
    index: options.Index = options.DEFAULT_INDEX, model: options.Model = None, json: options.Json = False
) -> None:
    """Show how many documents, chunks and bytes an index holds. Starts no engine."""
    from blendrag.cli.opening import open_index

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
    ):
        table.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    out().print(table)
