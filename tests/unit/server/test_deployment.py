"""What `blendrag serve --docker` and `--helm` print."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from blendrag.cli.app import app
from blendrag.engine.compat.start import server_options
from blendrag.engine.wire.recipe import SECRET
from blendrag.errors import ConfigError
from blendrag.server import Limits
from blendrag.server.command import SERVED
from blendrag.server.deployment import chart_values, container_command, image_file
from blendrag.settings import Settings
from places import ROOT

MODEL = "Qwen/Qwen2.5-7B-Instruct"
TIERS = [
    {"kind": "ram"},
    {"kind": "disk"},
    {"kind": "redis", "url": "redis://:hunter2@cache:6379/0"},
    {"kind": "object", "url": "s3://kv", "options": {"secret_access_key": "hunter2"}},
]
MORE = ["--max-num-queued-reqs", "64", "--tool-call-parser", "hermes"]


def printed(model_dir: Path, *more: str, **options: Any) -> tuple[str, str]:
    """The image file and the values."""
    settings = Settings.load(model=MODEL, **options)
    command = container_command(settings, model_dir, None, [*MORE, *more])
    return image_file(command, "0.32.0"), chart_values(settings, command)


def the_model(values: str) -> dict[str, Any]:
    (model,) = yaml.safe_load(values)["servingEngineSpec"]["modelSpec"]
    return model


def instructions(image: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in image.splitlines():
        name, _, rest = line.partition(" ")
        found.setdefault(name, []).append(rest)
    return found


def test_secret_is_not_printed(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "hunter2")
    image, values = printed(model_dir, tiers=TIERS)
    assert "hunter2" not in image + values
    env = {one["name"]: one for one in the_model(values)["env"]}
    for name, key in ((SECRET, "secret"), ("BLENDRAG_TIERS", "tiers")):
        assert env[name]["valueFrom"] == {"secretKeyRef": {"name": "blendrag", "key": key}}
        assert name in image.splitlines()[0]
        assert not any(line.startswith(f"{name}=") for line in instructions(image)["ENV"])


@pytest.mark.parametrize("words", [("--api-key", "hunter2"), ("--hf-token", "hunter2")])
def test_secret_of_vllm_is_refused(model_dir: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="is a secret"):
        printed(model_dir, *words)


def test_container_blends_as_the_server_here(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings come from files and variables, which are not there."""
    monkeypatch.setenv("BLENDRAG_RECOMPUTE_RATIO", "0.4")
    image, values = printed(model_dir, codec="int8")
    (served,) = (one["value"] for one in the_model(values)["env"] if one["name"] == SERVED)
    monkeypatch.delenv("BLENDRAG_RECOMPUTE_RATIO")
    there = Settings.load(**json.loads(served)["settings"])
    assert (there.model, there.recompute_ratio, there.codec) == (MODEL, 0.4, "int8")
    assert f"{SERVED}={json.dumps(served)}" in instructions(image)["ENV"]


def test_container_with_gpus_compiles_though_this_machine_does_not(model_dir: Path) -> None:
    assert not any("TORCH_COMPILE_DISABLE" in text for text in printed(model_dir))


def test_settings_of_clients_in_a_file_are_left_out(model_dir: Path) -> None:
    image, _ = printed(model_dir, temperature=0.7, similarity_top_k=3)
    assert "temperature" not in image


def test_docker_and_kubernetes_put_no_variables_into_values(model_dir: Path) -> None:
    separator = "$HOME $(HOME) $$(HOME)"
    image, values = printed(model_dir, "--chat-template", separator, separator=separator)
    (line,) = (one for one in instructions(image)["ENV"] if one.startswith(f"{SERVED}="))
    assert re.search(r"(?<!\\)\$", line) is None
    served = json.loads(json.loads(line.partition("=")[2].replace(r"\$", "$")))
    assert served["settings"]["separator"] == separator
    model = the_model(values)
    (there,) = (one["value"] for one in model["env"] if one["name"] == SERVED)
    for text in (there, *model["vllmConfig"]["extraArgs"]):
        assert "$" not in text.replace("$$", "")
    assert json.loads(there.replace("$$", "$")) == served
    assert model["vllmConfig"]["extraArgs"][-1].replace("$$", "$") == separator


def test_command_is_one_of_vllm(model_dir: Path) -> None:
    image, values = printed(model_dir, engine_args={"tensor_parallel_size": 1})
    lines = instructions(image)
    assert lines["FROM"] == ["vllm/vllm-openai:v0.32.0"]
    assert json.loads(lines["ENTRYPOINT"][0]) == ["vllm", "serve"]
    model = the_model(values)
    words = [model["modelURL"], *model["vllmConfig"]["extraArgs"]]
    assert json.loads(lines["CMD"][0]) == words
    options, unknown = server_options(words)
    assert not unknown
    assert options["model_tag"] == MODEL
    assert options["kv_transfer_config"].kv_connector == "GroupsConnector"
    assert options["max_num_queued_reqs"] == 64
    assert not options["enforce_eager"]  # as on GPUs, wherever it is printed
    assert not any("_CPU_" in line for line in lines["ENV"])
    assert str(model_dir) not in image + values


def test_image_has_the_blendrag_of_this_project(model_dir: Path, tmp_path: Path) -> None:
    """On an index, anyone may have taken the name. Of the rest, it has the versions that are locked."""
    image, _ = printed(model_dir)
    for line in instructions(image)["COPY"]:
        *sources, target = line.split()
        into = tmp_path / target.lstrip("/")
        for source in map(ROOT.joinpath, sources):
            if source.is_dir():
                shutil.copytree(source, into)
            else:
                into.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, into)
    (run,) = instructions(image)["RUN"]
    *_, constraint, locked, asked = shlex.split(run)
    what, _, extras = asked.rstrip("]").partition("[")
    assert constraint == "--constraint" and (tmp_path / locked.lstrip("/")).is_file()
    about = tomllib.loads((tmp_path / what.lstrip("/") / "pyproject.toml").read_text())
    assert about["project"]["name"] == "blendrag"
    assert "engine" in extras and set(extras.split(",")) <= set(about["project"]["optional-dependencies"])
    for file in ("README.md", "LICENSE", "blendrag/version.py"):  # what its build reads
        assert (tmp_path / what.lstrip("/") / file).is_file()


def test_no_two_servers_get_one_folder(model_dir: Path) -> None:
    _, values = printed(model_dir)
    assert the_model(values)["replicaCount"] == 1
    assert yaml.safe_load(values)["servingEngineSpec"]["strategy"] == {"type": "Recreate"}
    cache = {one["name"]: one.get("value") for one in the_model(values)["env"]}["BLENDRAG_CACHE_DIR"]
    assert cache.startswith("/data/")  # where the chart mounts pvcStorage


@pytest.mark.parametrize("option", ["--docker", "--helm"])
def test_model_of_this_machine_is_refused_to_another(model_dir: Path, option: str) -> None:
    result = CliRunner().invoke(app, ["serve", str(model_dir), option])
    assert result.exit_code == 1
    assert "hub id" in result.stderr


def test_container_asks_for_keys(model_dir: Path) -> None:
    """The file is not in the image, but where the container finds it."""
    settings = Settings.load(model=MODEL)
    keys, folder = Path("/run/secrets/keys"), Path("/data/tenants")
    command = container_command(settings, model_dir, folder, [], keys=keys, limits=Limits(body_mib=16))
    served = json.loads(command.variables[SERVED])
    assert (served["keys"], served["folder"], served["limits"]["body_mib"]) == (str(keys), str(folder), 16)
