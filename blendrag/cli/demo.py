"""``blendrag demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blendrag.cli import options


def demo(
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Folder of the demo's index, kept for the next time.")
    ] = None,
    model: options.Model = None,
) -> None:
    """Ingest real documents found on this machine, ask five questions, and show what was saved."""
    from blendrag.cli.demonstration import run_demo

    run_demo(folder, model)
