"""``blendrag verify``: is everything that an index has stored still what it was?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from blendrag.cli import options
from blendrag.cli.console import interruptible, print_json, say
from blendrag.progress import progress_bar

if TYPE_CHECKING:
    from blendrag.store.maintenance.verify import VerifyReport

_SHOWN = 20

Repair = Annotated[
    bool,
    typer.Option("--repair", help="Put damaged records aside, drop what nothing needs, prefill again later."),
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
        _print(report, repair)
    if report.left:
        raise typer.Exit(1)


def _print(report: VerifyReport, repair: bool) -> None:
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
        if not repair:
            typer.echo("blendrag verify --repair puts this right; the next ingest prefills what is gone")
    for count, what in ((report.doomed, "to be deleted"), (report.quarantined, "damaged before, kept aside")):
        if count:
            typer.echo(f"{count:,} files {what}: blendrag gc removes them")
