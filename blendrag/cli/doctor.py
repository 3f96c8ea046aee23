"""``blendrag doctor``: does blending work for this model, on this machine?"""

from __future__ import annotations

import typer
from rich.table import Table
from rich.text import Text

from blendrag.cli import options
from blendrag.cli.console import err, out, print_json, say


def doctor(
    model: options.Model = None,
    server: options.Server = None,
    api_key: options.ApiKey = None,
    json: options.Json = False,
) -> None:
    """Check blending with a model. Exit code 0 only if every check passes. With --server, say what a server
    does for its clients."""
    from blendrag.settings import Settings

    if server is not None:
        _about(server, api_key, json)
        return
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
        if report.scattered:
            out().print(f"scattered tokens attend by {report.scattered}")
        out().print(_calls_read(report.tool_parser))
        out().print(f"KV of a new index is stored as {report.stored}")
        for note in report.notes:
            say(note)
    if not report.passed:
        say(
            f"this model will be served without blending{', with exact prefixes' if report.exact else ''}"
            if report.unsupported
            else "blending cannot be trusted with this model here: serve it without (BLENDRAG_BLEND=false)"
        )
        raise typer.Exit(1)


def _about(server: str, api_key: str | None, json: bool) -> None:
    from blendrag.remote.chat import RemoteChat

    chat = RemoteChat(server, api_key)
    facts = {
        "model": chat.model_name,
        "context_window": chat.context_window,
        "knows_tools": chat.knows_tools,
        "tool_parser": chat.tool_parser,
    }
    if json:
        print_json(facts)
    else:
        out().print(f"{chat.model_name}, {chat.context_window:,} tokens of prompt and answer")
        out().print(_calls_read(chat.tool_parser, "the server"))
    chat.close()


def _calls_read(parser: str, who: str = "") -> str:
    read = f"by vLLM's parser {parser!r}" if parser else "by blendrag itself"
    return f"tool calls are read {read}{', in ' + who if who and parser else ''}"
