"""``blendrag serve``: a stock vLLM server that blends."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blendrag.cli.console import err, say
from blendrag.cli.options import path_option
from blendrag.server import LIMITS, Limits

if TYPE_CHECKING:
    from blendrag.settings import Settings

# Options that are neither ours nor settings are vLLM's.
ANY_OPTION = {"ignore_unknown_options": True}


def serve(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="Model: a folder, a hub id, or nothing for the index's own or the packaged default; then"
            " options of vLLM.",
            metavar="[MODEL] [OPTION...]",
            show_default=False,
        ),
    ] = None,
    index: Annotated[
        Path | None,
        path_option(
            "Folder of an index, or of KV alone; by default one per model.", "--index", "-i", metavar="PATH"
        ),
    ] = None,
    keys: Annotated[
        Path | None,
        path_option("File of the clients' keys; without one, everybody may do everything.", "--keys"),
    ] = None,
    max_body_mib: Annotated[int, typer.Option(min=1, help="Most MiB in a request's body.")] = LIMITS.body_mib,
    max_items: Annotated[
        int, typer.Option(min=1, help="Most messages in a request, and most documents that it names.")
    ] = LIMITS.items,
    max_text_mib: Annotated[
        int, typer.Option(min=1, help="Most MiB of texts that are split or turned into tokens at once.")
    ] = LIMITS.text_mib,
    repeats_gib: Annotated[
        float,
        typer.Option(min=0, help="Most GiB of KV of texts that come again in prompts; 0: none is kept."),
    ] = LIMITS.repeats_gib,
    show: Annotated[bool, typer.Option("--print", help="Print the command and do not run it.")] = False,
    docker: Annotated[bool, typer.Option("--docker", help="Print a Dockerfile for the command.")] = False,
    helm: Annotated[
        bool, typer.Option("--helm", help="Print Helm values for the chart of vLLM's production stack.")
    ] = False,
) -> None:
    """Serve a model to OpenAI clients, with the documents that it knows blended.

    Runs `vllm serve`. More options are settings (--codec int8) or vLLM's own (--port 8000).
    """
    from blendrag.engine.client.requirement import require_server

    require_server()
    from blendrag.engine.client.launch import server_environment
    from blendrag.engine.client.watchdog import ENDS_WITHIN_S
    from blendrag.files.lock import IndexLock
    from blendrag.models import resolve_model
    from blendrag.server.address import check_address
    from blendrag.server.command import check_given, serve_command, settings_among, tenants
    from blendrag.server.keys import read_keys
    from blendrag.serving.identity import with_model_of
    from blendrag.settings import Settings

    words = words or []
    model = words[0] if words and not words[0].startswith("-") else None
    given, more = settings_among(words if model is None else words[1:])
    check_given(given)
    given |= {} if model is None else {"model": model}
    settings = Settings.load(**given)
    folder = None if index is None else index.expanduser().resolve()
    if folder and keys is None and not (docker or helm):  # else it is of several, or in the container
        settings = with_model_of(folder, settings)
        given["model"] = settings.model
    limits = Limits(max_body_mib, max_items, max_text_mib, repeats_gib)
    here = not (show or docker or helm)
    if here:
        check_address(more)
    with err().status("looking for the model") as status:
        path = resolve_model(
            settings.model, settings.cache_dir, revision=settings.revision, progress=status.update
        )
        if docker or helm:
            from blendrag.engine.compat.platform import VLLM_VERSION
            from blendrag.server.deployment import chart_values, container_command, image_file

            _check_blending(settings)
            command = container_command(settings, path, index, more, keys=keys, limits=limits)
            text = chart_values(settings, command) if helm else image_file(command, VLLM_VERSION)
            return typer.echo(text, nl=False)
        file = None if keys is None else keys.expanduser().resolve()
        each = tenants(given, folder, None if file is None else read_keys(file))
        for _, root in each.values() if here else ():
            IndexLock(root, ENDS_WITHIN_S).release()
        _check_blending(settings)
        if here:
            os.environ.update(server_environment(settings))  # vLLM is asked already
        command = serve_command(settings, given, path, folder, more, keys=file, limits=limits)
    if show:
        shown = [f"{name}={shlex.quote(value)}" for name, value in command.variables.items()]
        typer.echo(" ".join([*shown, shlex.join(command.words)]))
        return
    from blendrag.serving.library import Library

    for one, root in each.values():  # what is wrong with it is said in one line, before a model is loaded
        if index is not None and not (root / "catalogue.sqlite").exists():
            say(f"{root} is new and empty: documents come over HTTP")
        Library(root, one, shared=True).close()
    program, variables = command.words[0], {**os.environ, **command.variables}
    beside = shutil.which(program, path=str(Path(sys.executable).parent))
    os.execvpe(beside or program, command.words, variables)


def _check_blending(settings: Settings) -> None:
    """Raise ConfigError for a wrong selector or codec. Apart, since it imports torch: what is said before is
    said at once."""
    from blendrag.select import make_selector
    from blendrag.store.codec import CODECS

    make_selector(settings.blending)
    CODECS[settings.new_codec]
