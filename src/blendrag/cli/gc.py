"""``blendrag gc``: give back disk space that an index does not need."""

from __future__ import annotations

import typer

from blendrag.cli import options
from blendrag.cli.console import print_json


def gc(index: options.Index = options.DEFAULT_INDEX, json: options.Json = False) -> None:
    """Remove files that nothing needs, and compact the databases."""
    from blendrag.cli.bars import care_bar
    from blendrag.store.care.folder import closed_index
    from blendrag.store.care.gc import collect

    with closed_index(index) as opened, care_bar() as bar:
        freed = collect(opened, bar)
    if json:
        print_json(freed.to_dict())
        return
    for kind, size in freed.bytes.items():
        files = freed.files.get(kind)
        typer.echo(f"{kind}: {f'{files:,} files, ' if files else ''}{size / 2**20:,.1f} MiB")
    typer.echo(f"freed {freed.total / 2**20:,.1f} MiB")
