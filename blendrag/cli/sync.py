"""``blendrag sync``: the KV of what another program's vector store holds."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict
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
    from blendrag.vectorstores import Address

    at, first = Address.read(store, store_key), True
    with interruptible("interrupted: what was prefilled is kept; the same command goes on from there"):
        while True:
            try:
                _sync(at, name or str(at), server or [None], api_key, model, text_field, json)
            except BlendragError as error:
                if first or watch is None:
                    raise
                say(f"error: {error}; the next try is in {watch:g} minutes")
            if watch is None:
                break
            first = False
            time.sleep(60 * watch)


def _sync(
    at: Address,
    name: str,
    servers: list[str] | list[None],
    api_key: str | None,
    model: str | None,
    text_field: str | None,
    json: bool,
) -> None:
    from blendrag.remote.chat import open_chat
    from blendrag.vectorstores import sync

    failed: BlendragError | None = None
    for server in servers:
        try:
            with closing(open_chat({"model": model}, None, server, api_key)) as chat:
                report = sync(at, chat.collection(name), text_field=text_field)
        except BlendragError as error:  # the servers behind it are not to miss what this one does
            failed = failed or error
            if len(servers) > 1:
                say(f"{server}: {error}")
            continue
        if json:
            print_json({"store": str(at), "server": server, **asdict(report)})
        else:
            _print(report, at)
    if failed is not None:
        raise failed


def _print(report: StoreReport, at: Address) -> None:
    if report.not_blended:
        say(f"this model is served without blending: {report.not_blended}")
    for count, why in (
        (report.textless, "without a text"),
        (report.too_large, "with a text of more than a million characters"),
    ):
        if count:
            say(f"left out {count:,} rows {why}")
    if report.too_long:
        say(f"{report.too_long:,} texts do not fit into the model's window")
    typer.echo(
        f"{at}: {report.added:,} texts added, {report.changed:,} changed, {report.unchanged:,} unchanged,"
        f" {report.removed:,} removed"
    )
    say_prefilled(report)
