"""A server in containers: a Dockerfile, and values for the chart of vLLM's production stack.

The command is that of ``blendrag serve``. What is secret is read from where the container runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # comes with pydantic-settings[yaml]

from blendrag.engine.wire.recipe import SECRET
from blendrag.errors import ConfigError
from blendrag.models import DEFAULT_MODEL
from blendrag.server import LIMITS, Limits
from blendrag.server.command import CLIENTS, ServeCommand, serve_command
from blendrag.settings import Settings
from blendrag.version import __version__

_DATA = "/data"  # the chart's volume, for models and KV
_SECRET = "blendrag"  # the Kubernetes secret
_TIERS = "BLENDRAG_TIERS"
_NO_FILE = frozenset({"api_key", "hf_token", "ssl_keyfile_password"})


def container_command(
    settings: Settings,
    model: Path,
    folder: Path | None,
    more: Sequence[str],
    *,
    keys: Path | None = None,
    limits: Limits = LIMITS,
) -> ServeCommand:
    """Return the command in a container with GPUs, without its first words. All settings that are not the
    default, and that a server has use for, travel with it, since no ``blendrag.yaml`` does; of tiers, the
    place only. folder, keys: in the container.

    Raises ConfigError for a model that is not on the hub, and for what is secret.
    """
    from blendrag.engine.compat.start import server_options

    if settings.model.lower() == DEFAULT_MODEL or Path(settings.model).expanduser().exists():
        raise ConfigError("a container downloads its model: name it by its hub id")
    if settings.lora is not None:
        raise ConfigError("an adapter is not in the image: merge it, and name the new model")
    (usual, _), (theirs, _) = server_options([]), server_options(more)
    named = {name for name, value in theirs.items() if value != usual[name]} | settings.engine_args.keys()
    for name in sorted(_NO_FILE & named):
        raise ConfigError(f"{name} is a secret, which is not printed: give it to the container")
    apart = {"cache_dir", "tiers", *CLIENTS}
    given = settings.model_dump(mode="json", exclude_defaults=True, exclude=apart)
    command = serve_command(settings, given, model, folder, more, on_cpu=False, keys=keys, limits=limits)
    variables = {
        name: value
        for name, value in command.variables.items()
        if not ("_CPU_" in name or name == "TORCH_COMPILE_DISABLE")  # which are of CPUs
    }
    variables |= {"HF_HOME": _DATA, "BLENDRAG_CACHE_DIR": f"{_DATA}/blendrag", SECRET: ""}
    if settings.tiers:
        variables[_TIERS] = ""
    words = list(command.words)
    at = words.index("--model")
    return ServeCommand(variables, (settings.model, *words[at + 2 :]))


def image_file(command: ServeCommand, vllm: str) -> str:
    """Return a Dockerfile for ``docker build`` in a checkout. vllm: the version of the image that it is
    built on. No index is asked for blendrag: whoever has its name there would be in the image."""
    secret = [name for name, value in command.variables.items() if not value]
    lines = [
        f"# Run it with --gpus all, a volume at {_DATA}, and in its environment {' and '.join(secret)}.",
        f"FROM vllm/vllm-openai:v{vllm}",
        "COPY pyproject.toml README.md LICENSE requirements/cpu.lock /opt/blendrag/",
        "COPY blendrag /opt/blendrag/blendrag",
        "RUN python3 -m pip install --no-cache-dir --constraint /opt/blendrag/cpu.lock"
        " '/opt/blendrag[engine,index,redis,s3]'",
        *(f"ENV {name}={_quoted(value)}" for name, value in command.variables.items() if value),
        f"VOLUME {_DATA}",
        f"ENTRYPOINT {json.dumps(['vllm', 'serve'])}",
        f"CMD {json.dumps(list(command.words))}",
    ]
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    """Quote a text for ``ENV``, which puts variables into what it reads."""
    return json.dumps(value).replace("$", "\\$")


def chart_values(settings: Settings, command: ServeCommand) -> str:
    """Return YAML for ``helm install ... vllm/vllm-stack -f``; the image is that of :func:`image_file`."""
    model, *options = command.words
    gpus = settings.tensor_parallel_size
    engine: dict[str, Any] = {
        "enablePrefixCaching": settings.prefix_caching,
        "extraArgs": list(map(_literal, options)),
    }
    if gpus > 1:  # the chart gives it shared memory then
        engine["tensorParallelSize"] = gpus
    values = {
        "servingEngineSpec": {
            "strategy": {"type": "Recreate"},  # the next one cannot open the folder before the last one ends
            "modelSpec": [
                {
                    "name": re.sub(r"[^a-z0-9]+", "-", model.rpartition("/")[2].lower()).strip("-"),
                    "repository": "blendrag",
                    "tag": __version__,
                    "modelURL": model,
                    "replicaCount": 1,
                    "requestCPU": 4 * gpus,
                    "requestMemory": "32Gi",
                    "requestGPU": gpus,
                    "pvcStorage": "100Gi",
                    "vllmConfig": engine,
                    "env": _env(command.variables),
                }
            ],
        }
    }
    head = f"# Needs the image of `blendrag serve --docker`, and a Kubernetes secret named {_SECRET}.\n"
    return head + str(yaml.safe_dump(values, sort_keys=False, width=1000))


def _literal(value: str) -> str:
    """Quote a text for Kubernetes, which puts variables into ``$(NAME)`` and reads ``$$`` as one ``$``."""
    return value.replace("$", "$$")


def _env(variables: Mapping[str, str]) -> list[dict[str, Any]]:
    keys = {SECRET: "secret", _TIERS: "tiers"}
    return [
        {"name": name, "value": _literal(value)}
        if value
        else {"name": name, "valueFrom": {"secretKeyRef": {"name": _SECRET, "key": keys[name]}}}
        for name, value in variables.items()
        if name != "HF_HOME"  # the chart sets it
    ]
