"""``blendrag ingest``: documents into an index."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blendrag.cli import options
from blendrag.cli.console import interruptible, print_json, say, shown

if TYPE_CHECKING:
    from blendrag.index.ingest import IngestReport

_SHOWN_SKIPPED = 10


def ingest(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Files and folders: text, Markdown, HTML, PDF, EPUB, Word, PowerPoint, Excel.",
            show_default=False,
        ),
    ],
    index: options.Index = options.DEFAULT_INDEX,
    model: options.Model = None,
    server: options.Servers = None,
    api_key: options.ApiKey = None,
    json: options.Json = False,
) -> None:
    """Put documents into an index. Repeat it after changes: what is unchanged is skipped."""
    from blendrag.cli.opening import open_index, open_served
    from blendrag.index.loaders import load_sources

    load_sources(paths)  # a wrong path is an error before an index is made
    with (
        interruptible("interrupted: what was ingested is kept; the same command goes on from there"),
        open_served(index, server, api_key, create=True, model=model)
        if server
        else open_index(index, create=True, model=model) as opened,
    ):
        report = opened.ingest(paths)
    if json:
        print_json(report.to_dict())
    else:
        _print(report, index)


def _print(report: IngestReport, folder: Path) -> None:
    for skipped in report.skipped[:_SHOWN_SKIPPED]:
        say(f"skipped {shown(skipped.source)}: {skipped.reason}")
    if len(report.skipped) > _SHOWN_SKIPPED:
        say(f"skipped {len(report.skipped) - _SHOWN_SKIPPED} more (--json lists them)")
    if report.not_blended:
        say(f"this model is served without blending: {report.not_blended}")
    reread = f" ({report.reread} of them by a newer reader of the same file)" if report.reread else ""
    typer.echo(
        f"{shown(str(folder))}: {report.added} documents added, {report.changed} changed{reread},"
        f" {report.unchanged} unchanged, {report.removed} removed"
    )
    if report.chunks:
        typer.echo(
            f"{report.tokens:,} tokens in {report.chunks:,} chunks prefilled at"
            f" {report.tokens_per_s:,.0f} tokens/s; {report.nbytes / 2**20:,.0f} MiB of KV written"
        )
