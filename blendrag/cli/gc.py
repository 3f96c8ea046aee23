"""``blendrag gc``: give back disk space that an index does not need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from blendrag.cli import options
from blendrag.cli.console import print_json, say
from blendrag.progress import progress_bar

if TYPE_CHECKING:
    from blendrag.store.maintenance.gc import Freed


def gc(index: options.Index = options.DEFAULT_INDEX, json: options.Json = False) -> None:
    """Remove files that nothing needs, and compact the databases."""
    from blendrag.settings import Settings
    from blendrag.store.maintenance.closed_index import closed_index
    from blendrag.store.maintenance.gc import collect

    stack = Settings.load().stack
    with closed_index(index) as opened, progress_bar(unit="bytes") as bar:
        freed = collect(opened, stack, bar)
    if json:
        print_json(freed.to_dict())
    else:
        _print(freed)
    if freed.left:
        raise typer.Exit(1)


def _print(freed: Freed) -> None:
    for kind, size in freed.bytes.items():
        files = freed.files.get(kind)
        typer.echo(f"{kind}: {f'{files:,} files, ' if files else ''}{size / 2**20:,.1f} MiB")
    if freed.left:
        say(f"{freed.left:,} chunks to be deleted are in a tier that cannot be written or reached now")
    typer.echo(f"freed {freed.total / 2**20:,.1f} MiB")
