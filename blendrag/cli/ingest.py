"""``blendrag ingest``: documents into an index."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blendrag.cli import options
from blendrag.cli.console import interruptible, print_json, say, say_prefilled, shown
from blendrag.errors import ConfigError
from blendrag.progress import progress_bar

if TYPE_CHECKING:
    from blendrag.index.index import BlendIndex
    from blendrag.index.ingest import IngestReport

_SHOWN_SKIPPED = 10


def ingest(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Files and folders: text, Markdown, HTML, PDF, EPUB, Word, PowerPoint, Excel.",
            show_default=False,
            parser=options.named_path,
        ),
    ] = None,
    index: options.Index = options.DEFAULT_INDEX,
    model: options.Model = None,
    questions: Annotated[
        Path | None,
        options.path_option("Questions, one a line, whose exact prefixes are kept on disk."),
    ] = None,
    server: options.Servers = None,
    api_key: options.ApiKey = None,
    json: options.Json = False,
) -> None:
    """Put documents into an index. Repeat it after changes: what is unchanged is skipped."""
    from blendrag.cli.opening import open_index, open_served
    from blendrag.index.index import BlendIndex
    from blendrag.index.loaders import resolved

    if not paths and questions is None:
        raise typer.BadParameter("no paths are given, nor --questions", param_hint="PATHS")
    resolved(paths or ())  # a wrong path is an error before an index is made
    asked = _read_questions(questions) if questions else []
    found: dict[str, Any] = {}
    with (
        interruptible("interrupted: what was ingested is kept; the same command goes on from there"),
        open_served(index, server, api_key, create=True, model=model)
        if server
        else open_index(index, create=bool(paths), model=model) as opened,
    ):
        if asked and not (isinstance(opened, BlendIndex) and opened.settings.tree_stays):
            raise ConfigError(
                "--questions: exact prefixes would end with this command: give a disk of tiers tree_bytes"
            )
        if paths:
            report = opened.ingest(paths)
            found |= report.to_dict()
            if not json:
                _print(report, index)
        if asked:
            assert isinstance(opened, BlendIndex)
            found["tree"] = tree = _grow_tree(opened, asked)
            if not json:
                held = f"{tree['nodes']:,} nodes, {tree['bytes'] / 2**20:,.0f} MiB in all"
                typer.echo(f"{tree['grown']:,} nodes grown; {held}")
    if json:
        print_json(found)


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
    say_prefilled(report)


def _read_questions(path: Path) -> list[str]:
    """Read questions, one per line. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from None
    return [line.strip() for line in lines if line.strip()]


def _grow_tree(index: BlendIndex, questions: Sequence[str]) -> dict[str, Any]:
    """Grow questions' prefixes on disk. Returns how many are new, and what there is."""
    from blendrag.cli.opening import start_engine

    grown = 0
    start_engine(index)
    with interruptible("interrupted: what has grown is kept"), progress_bar() as bar:
        bar.note("growing")
        bar.total(len(questions))
        for question in questions:
            grown += index.warm(question)
            bar.advance()
    return {"questions": len(questions), "grown": grown, **index.stats()["tree"]}
