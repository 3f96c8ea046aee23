"""``blendrag export`` and ``blendrag import``: move an index to another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blendrag.cli import options
from blendrag.cli.console import interruptible, print_json, shown
from blendrag.progress import progress_bar

File = Annotated[
    Path, typer.Argument(help="The exported index: one tar file.", metavar="FILE.tar", show_default=False)
]
Folder = Annotated[
    Path, typer.Argument(help="Where to make the index: a folder that does not exist.", show_default=False)
]
NoKV = Annotated[bool, typer.Option("--no-kv", help="Leave the KV out: an ingest computes it again.")]


def export(
    file: File,
    index: options.Index = options.DEFAULT_INDEX,
    no_kv: NoKV = False,
    json: options.Json = False,
) -> None:
    """Write a whole index into one file. Starts no engine."""
    from blendrag.store.maintenance.archive import export_index
    from blendrag.store.maintenance.closed_index import closed_index

    with (
        interruptible("interrupted: no file was left behind"),
        closed_index(index) as opened,
        progress_bar(unit="bytes") as bar,
    ):
        header = export_index(opened, file, kv=not no_kv, progress=bar)
    if json:
        print_json(header.to_dict())
        return
    typer.echo(f"{shown(str(file))}: {header.files:,} files, {header.nbytes / 2**20:,.0f} MiB")


def import_(file: File, folder: Folder, json: options.Json = False) -> None:
    """Make an index from an exported file, after checking all of it."""
    from blendrag.store.maintenance.archive import import_archive

    with interruptible("interrupted: no folder was left behind"), progress_bar(unit="bytes") as bar:
        header = import_archive(file, folder, progress=bar)
    if json:
        print_json(header.to_dict())
        return
    typer.echo(
        f"{shown(str(folder))}: {header.files:,} files, {header.nbytes / 2**20:,.0f} MiB;"
        f" open it with the model {header.identity.model}"
    )
    if not header.kv:
        typer.echo("its KV was not exported: blendrag ingest computes it")
