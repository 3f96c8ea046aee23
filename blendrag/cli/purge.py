"""``blendrag purge``: make an index forget a document."""

from __future__ import annotations

from typing import Annotated

import typer

from blendrag.cli import options
from blendrag.cli.console import print_json, shown

Document = Annotated[
    str, typer.Option("--document", "-d", help="The document; a file by its path.", show_default=False)
]


def purge(
    document: Document,
    index: options.Index = options.DEFAULT_INDEX,
    model: options.Model = None,
    json: options.Json = False,
) -> None:
    """Remove a document's texts, vectors and KV from every tier, and overwrite them. Starts no engine."""
    from blendrag.cli.opening import open_index

    with open_index(index, model=model) as opened:
        purged = opened.purge(document)
    if json:
        print_json(purged.to_dict())
        return
    counts = f"{purged.chunks:,} chunks with their KV and {purged.vectors:,} vectors"
    typer.echo(f"{shown(purged.source)}: {counts} removed")
    if purged.tiers:
        typer.echo(f"also from {', '.join(purged.tiers)}")
    if purged.shared:
        typer.echo(f"{purged.shared:,} chunks stay, because other documents have the same text")
