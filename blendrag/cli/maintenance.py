"""``blendrag verify``, ``gc`` and ``purge``: commands that look after an index, without an engine."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Annotated

import typer

from blendrag.cli import options
from blendrag.cli.console import interruptible, print_json, say, shown
from blendrag.progress import progress_bar

if TYPE_CHECKING:
    from blendrag.store.maintenance.gc import Freed
    from blendrag.store.maintenance.verify import VerifyReport

_SHOWN = 20  # problems

Repair = Annotated[
    bool,
    typer.Option("--repair", help="Put damaged records aside, drop what nothing needs, prefill again later."),
]
Tree = Annotated[bool, typer.Option("--tree", help="Remove all exact prefixes, too.")]
Document = Annotated[
    str, typer.Option("--document", "-d", help="The document; a file by its path.", show_default=False)
]


def verify(
    index: options.Index = options.DEFAULT_INDEX, repair: Repair = False, json: options.Json = False
) -> None:
    """Read every stored record and compare its checksums. Exit code 1 if anything is (still) wrong."""
    from blendrag.settings import Settings
    from blendrag.store.maintenance.closed_index import closed_index, other_tiers
    from blendrag.store.maintenance.verify import Verifier

    stack = Settings.load().stack
    with (
        interruptible("interrupted: what was repaired so far stays repaired" if repair else "interrupted"),
        closed_index(index) as opened,
        other_tiers(opened.catalogue, stack) as others,
        progress_bar(unit="bytes") as bar,
    ):
        report = Verifier(opened, others, stack=stack, progress=bar, repair=repair).run()
    if json:
        print_json(report.to_dict())
    else:
        _print_verified(report, repair)
    if report.left:
        raise typer.Exit(1)


def _print_verified(report: VerifyReport, repair: bool) -> None:
    for problem in report.problems[:_SHOWN]:
        say(f"{problem.kind}: {problem.name}{f' ({problem.detail})' if problem.detail else ''}")
    if (total := report.counts.total()) > _SHOWN:
        say(f"and {total - _SHOWN:,} more (--json lists them)")
    if report.unasked:
        say(f"{report.unasked:,} chunks may be in another tier, which cannot be reached now")
    typer.echo(f"{report.records:,} records are sound ({report.bytes / 2**20:,.0f} MiB)")
    if report.elsewhere:
        typer.echo(f"{report.elsewhere:,} chunks are in other tiers only, which are not read here")
    if report.foreign:
        typer.echo(f"{report.foreign:,} records in a folder that may be shared are not this index's")
    if total:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(report.counts.items()))
        typer.echo(f"problems: {kinds}; repaired: {report.repaired:,}")
        if not repair and report.counts.keys() - {"stranger", "database", "vectors"}:
            typer.echo("blendrag verify --repair puts this right; the next ingest prefills what is gone")
    for count, what in ((report.doomed, "to be deleted"), (report.quarantined, "damaged before, kept aside")):
        if count:
            typer.echo(f"{count:,} files {what}: blendrag gc removes them")


def gc(index: options.Index = options.DEFAULT_INDEX, tree: Tree = False, json: options.Json = False) -> None:
    """Remove files that nothing needs, and compact the databases."""
    from blendrag.serving.prefixes import tree_folder
    from blendrag.settings import Settings
    from blendrag.store.maintenance.closed_index import closed_index
    from blendrag.store.maintenance.gc import collect

    stack = Settings.load().stack
    with closed_index(index) as opened, progress_bar(unit="bytes") as bar:
        folder, prefixes = tree_folder(opened.root), 0
        if tree:
            prefixes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            shutil.rmtree(folder, ignore_errors=True)
        freed = collect(opened, stack, bar)
    if tree:
        freed.bytes["exact prefixes"] = prefixes
    if json:
        print_json(freed.to_dict())
    else:
        _print_freed(freed)
    if freed.left:
        raise typer.Exit(1)


def _print_freed(freed: Freed) -> None:
    for kind, size in freed.bytes.items():
        files = freed.files.get(kind)
        typer.echo(f"{kind}: {f'{files:,} files, ' if files else ''}{size / 2**20:,.1f} MiB")
    if freed.left:
        say(f"{freed.left:,} chunks to be deleted are in a tier that cannot be written or reached now")
    typer.echo(f"freed {freed.total / 2**20:,.1f} MiB")


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
