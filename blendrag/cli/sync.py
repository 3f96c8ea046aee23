"""``blendrag sync``: the KV of what another program's vector store holds."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict
from itertools import count
from typing import TYPE_CHECKING, Annotated

import typer

from blendrag.cli import options
from blendrag.cli.console import interruptible, print_json, say, say_prefilled
from blendrag.errors import BlendragError

if TYPE_CHECKING:
    from blendrag.vectorstores import Address, StoreReport

STORE_KEY = "BLENDRAG__STORE_KEY"
"""The variable that holds the key or password of the store, where its URL has none."""


def sync(
    store: Annotated[
        str,
        typer.Argument(
            help="Kind, place and collection, as in qdrant://localhost:6333/handbook.", metavar="URL"
        ),
    ],
    server: options.Servers = None,
    api_key: options.ApiKey = None,
    model: options.Model = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the collection that follows the store; by default, the URL.", metavar="NAME"
        ),
    ] = None,
    text_field: Annotated[
        str | None,
        typer.Option(help="Field that holds the text, if it is none of the usual ones.", metavar="NAME"),
    ] = None,
    store_key: Annotated[
        str | None,
        typer.Option(
            envvar=STORE_KEY, help="Key or password of the store.", metavar="KEY", show_default=False
        ),
    ] = None,
    watch: Annotated[
        float | None, typer.Option(min=0.1, help="Do it again every so many minutes.", metavar="MINUTES")
    ] = None,
    json: options.Json = False,
) -> None:
    """Keep the KV of what a vector store of another program holds: on servers, or in the folder of KV that
    ChatBlend and BlendLLM have without one.

    Repeat it after changes: what is unchanged costs nothing, what has left the store is released.
    """
    from blendrag import vectorstores
    from blendrag.remote.chat import open_chat

    at, servers = vectorstores.Address.read(store, store_key), [*server] if server else [None]

    def tell_servers() -> BlendragError | None:
        failed = None
        for one in servers:
            try:
                with closing(open_chat({"model": model}, None, one, api_key)) as chat:
                    report = vectorstores.sync(at, chat.collection(name or str(at)), text_field=text_field)
            except BlendragError as error:  # the servers behind it are not to miss what this one does
                failed = failed or error
                if len(servers) > 1:
                    say(f"{one}: {error}")
                continue
            if json:
                print_json({"store": str(at), "server": one, **asdict(report)})
            else:
                _print(report, at)
        return failed

    with interruptible("interrupted: what was prefilled is kept; the same command goes on from there"):
        for number in count():
            failed = tell_servers()
            if failed and (watch is None or not number):
                raise failed
            if watch is None:
                break
            if failed:
                say(f"error: {failed}; the next try is in {watch:g} minutes")
            time.sleep(60 * watch)


def _print(report: StoreReport, at: Address) -> None:
    if report.not_blended:
        say(f"this model is served without blending: {report.not_blended}")
    for rows, why in (
        (report.textless, "without a text"),
        (report.too_large, "with a text of more than a million characters"),
    ):
        if rows:
            say(f"left out {rows:,} rows {why}")
    if report.too_long:
        say(f"{report.too_long:,} texts do not fit into the model's window")
    typer.echo(
        f"{at}: {report.added:,} texts added, {report.changed:,} changed, {report.unchanged:,} unchanged,"
        f" {report.removed:,} removed"
    )
    say_prefilled(report)
