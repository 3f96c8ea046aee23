"""``blendrag doctor``: does blending work for this model, on this machine?"""

from __future__ import annotations

import typer
from rich.table import Table
from rich.text import Text

from blendrag.cli import options
from blendrag.cli.console import err, out, print_json, say


def doctor(model: options.Model = None, json: options.Json = False) -> None:
    """Check blending with a model. Exit code 0 only if every check passes."""
    from blendrag.settings import Settings

    settings = Settings.load(model=model)
    with err().status("importing") as status:
        from blendrag.lab.doctor import run_doctor

        report = run_doctor(settings, status.update)
    if json:
        print_json(report.to_dict())
    else:
        run = f", layers {report.layers}" if report.layers else ""
        has = f", with {' and '.join(report.attention)}" if report.attention else ""
        table = Table(title=f"{report.model} ({report.architecture}{run}{has})", title_justify="left")
        for column in ("check", "value", "limit", ""):
            table.add_column(column, justify="right" if column in ("value", "limit") else "left")
        for row in report.rows:
            mark = Text("ok", style="green") if row.ok else Text("FAILED", style="bold red")
            table.add_row(Text(row.check), Text(row.value), Text(row.limit), mark)
        out().print(table)
        for note in report.notes:
            say(note)
    if not report.passed:
        say(
            "this model will be served without blending"
            if report.unsupported
            else "blending cannot be trusted with this model here: serve it without (BLENDRAG_BLEND=false)"
        )
        raise typer.Exit(1)
