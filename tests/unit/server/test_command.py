"""The command that ``blendrag serve`` runs."""

from __future__ import annotations

import json
import os
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from blendrag.cli.app import app
from blendrag.engine.wire.recipe import SECRET
from blendrag.errors import ConfigError
from blendrag.server.command import SERVED, ServeCommand, serve_command, settings_among, tenants
from blendrag.server.keys import read_keys
from blendrag.serving.library import Library
from blendrag.settings import Settings


def serve(*words: str, **environment: str) -> Result:
    env = {"NO_COLOR": "1", "COLUMNS": "300", **environment}
    return CliRunner(env=env).invoke(app, ["serve", "--print", *words])


def refusal(*words: str, **environment: str) -> str:
    """The one line that is said instead of a command."""
    result = serve(*words, **environment)
    assert result.exit_code == 1 and result.stderr.startswith("error: "), result.output
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


def made(model_dir: Path, *words: str, **options: Any) -> ServeCommand:
    return serve_command(Settings.load(**options), {}, model_dir, None, words)


@pytest.mark.parametrize(
    ("words", "given", "others"),
    [
        (["--port", "8000"], {}, ["--port", "8000"]),
        (["--max-model-len", "4096", "--port=1"], {"max_model_len": "4096"}, ["--port=1"]),
        (["--max_model_len=4096"], {"max_model_len": "4096"}, []),
        (["--no-blend", "--host", "::"], {"blend": False}, ["--host", "::"]),
        (["--blend", "--codec", "int8"], {"blend": True, "codec": "int8"}, []),
        (
            ["--enforce-eager", "-tp", "2"],
            {"engine_args": {"enforce_eager": True, "tensor_parallel_size": 2}},
            [],
        ),
        (["--no-enable-prefix-caching"], {"engine_args": {"enable_prefix_caching": False}}, []),
        (
            ["--max-num-seqs=8", '--engine-args={"seed": 1}'],
            {"engine_args": {"max_num_seqs": 8, "seed": 1}},
            [],
        ),
        (["--ram-bytes", "5", "--no-prefix-caching"], {"ram_bytes": "5", "prefix_caching": False}, []),
        (['--tiers=[{"kind": "ram"}]'], {"tiers": [{"kind": "ram"}]}, []),
        (
            ["--system-prompt", "[Be brief]", "--separator={"],
            {"system_prompt": "[Be brief]", "separator": "{"},
            [],
        ),
        (["--no-such", "--no-enable-log-requests"], {}, ["--no-such", "--no-enable-log-requests"]),
    ],
)
def test_setting_is_told_from_an_option_of_vllm(
    words: list[str], given: dict[str, object], others: list[str]
) -> None:
    assert settings_among(words) == (given, others)


def test_broken_json_is_refused() -> None:
    with pytest.raises(ConfigError, match="JSON"):
        settings_among(["--tiers", "[{"])


def test_server_has_the_settings_that_were_asked_for(model_dir: Path) -> None:
    """What the plugin reads from the connector's configuration are the settings of the command."""
    given, more = settings_among(["--codec", "int8", "--recompute-ratio", "0.3", "--port", "8000"])
    settings = Settings.load(**given)
    command = serve_command(settings, given, model_dir, Path("/kv"), more)
    assert command.words[-2:] == ("--port", "8000")
    served = json.loads(command.variables[SERVED])
    assert served["folder"] == "/kv"
    assert Settings.load(**served["settings"]) == settings


def test_window_that_the_model_has_not_is_refused_in_one_line(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"so: .*max_model_len \(100000000\) is greater") as raised:
        made(model_dir, max_model_len=100_000_000)
    assert "\n" not in str(raised.value)


def test_each_server_has_a_secret_of_its_own(model_dir: Path) -> None:
    one, other = (made(model_dir).variables[SECRET] for _ in "12")
    assert one != other and len(one) == 64


def test_plugins_of_the_user_are_kept(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "theirs")
    assert made(model_dir).variables["VLLM_PLUGINS"] == "theirs,blendrag"
    monkeypatch.delenv("VLLM_PLUGINS")
    named = made(model_dir).variables["VLLM_PLUGINS"].split(",")
    assert {plugin.name for plugin in entry_points(group="vllm.general_plugins")} <= set(named)
    assert len(named) == len(set(named))


@pytest.mark.parametrize(
    ("words", "waits"),
    [
        ([], "5"), (["--api-server-count", "2"], None), (["--data-parallel-size", "2"], None),
        (["--data-parallel-size", "2", "--api-server-count", "1"], "5"),
    ],
)  # fmt: skip
def test_api_servers_wait_for_a_long_start(words: list[str], waits: str | None, model_dir: Path) -> None:
    assert made(model_dir, *words).variables.get("VLLM_ENGINE_READY_TIMEOUT_S") == waits


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--quantization", "fp8"], "--quantization cannot be given"),
        (["-q", "fp8"], "--quantization cannot be given"),
        (["--tokenizer", "another"], "--tokenizer cannot be given"),
        (["--hf-overrides", '{"rope_theta": 1}'], "--hf-overrides cannot be given"),
        (["--load-format", "dummy"], "--load-format cannot be given"),
        (["--enable-lora"], "--enable-lora cannot be given"),
        (["--lora-modules", "a=b"], "--lora-modules cannot be given"),
        (["--data-parallel-size", "2", "--data-parallel-rank", "1"], "each with its folder"),
        (["--headless"], "each with its folder"),
        (["--config", "vllm.yaml"], r"--config cannot be given .* would not be checked"),
        (["--config=vllm.yaml"], "--config cannot be given"),
        (["--runner", "pooling"], "--runner cannot be given"),
        (["--convert", "embed"], "--convert cannot be given"),
        (["--kv-transfer-config", "{}"], "--kv-transfer-config cannot be given"),
        (["--data-parallel-backend", "ray"], "--data-parallel-backend cannot be given .* without the secret"),
        (["--port", "8000", "another/model"], "blendrag serve another/model"),
        (["--recompte-ratio", "0.5"], "did you mean --recompute-ratio"),
        (["--prot", "8000"], "did you mean --port"),
        (["--repeat-gib", "8"], "did you mean --repeats-gib"),
        (["--port", "many"], "port"),
    ],
)
def test_option_that_would_store_another_models_kv_is_refused(
    model_dir: Path, words: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        made(model_dir, *words)


def test_option_that_is_refused_is_refused_among_settings_too(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot have data_parallel_backend: .* without the secret"):
        made(model_dir, engine_args={"data_parallel_backend": "ray"})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--codec", "int7"], "int7"),
        (["--recompute-ratio", "2"], "recompute_ratio"),
        (["no-such-folder/model"], "no-such-folder/model"),
        (["--lora", "an/adapter"], "an/adapter"),
        (["-tp", "2"], "tensor_parallel_size 2 does not divide the 9 attention heads of smollm2-135m"),
        (["--temperature", "0.5"], "temperature is for clients to say"),
        (["--temperature", "0.5", "--docker"], "temperature is for clients to say"),
    ],
)
def test_wrong_setting_or_model_starts_no_server(words: list[str], said: str) -> None:
    assert said in refusal(*words)


def test_printed_command_is_for_a_shell(model_dir: Path) -> None:
    result = serve(str(model_dir), "--port", "8000")
    assert result.exit_code == 0, result.stderr
    assert "VLLM_PLUGINS=" in result.stdout
    assert "--worker-extension-cls blendrag.engine.worker.extension.BlendWorker" in result.stdout


def test_folder_that_is_new_is_said_once(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(os, "execvpe", lambda *_: None)
    for said in (f"{tmp_path / 'kb'} is new and empty: documents come over HTTP\n", ""):
        result = CliRunner().invoke(app, ["serve", str(model_dir), "--index", str(tmp_path / "kb")])
        assert (result.exit_code, result.stderr) == (0, said)


def test_index_is_served_with_its_own_model(model_dir: Path, tmp_path: Path) -> None:
    Library(tmp_path / "kb", Settings.load(model=str(model_dir))).close()
    result = serve("--index", str(tmp_path / "kb"))
    assert result.exit_code == 0, result.stderr
    assert f"--model {model_dir} " in result.stdout and f'"model": "{model_dir}"' in result.stdout


KEY = f"{'0' * 64} acme ask"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n{'1' * 64} globex ask,ingest")
    return file


def test_tenants_have_folders_of_their_own(keys: Path, tmp_path: Path) -> None:
    known = read_keys(keys)
    in_one, apart = tenants({"codec": "int8"}, tmp_path, known), tenants({}, None, known)
    assert {name: folder for name, (_, folder) in in_one.items()} == {
        "acme": tmp_path / "acme",
        "globex": tmp_path / "globex",
    }
    assert in_one["acme"][0] == Settings.load(codec="int8", namespace="acme")
    assert len({folder for _, folder in apart.values()}) == 2
    assert list(tenants({}, tmp_path, None)) == [""]


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        (["--namespace", "acme"], {}, "with --keys, they say the namespace"),
        ([], {"BLENDRAG_NAMESPACE": "acme"}, "with --keys, they say the namespace"),
        (["--api-key", "secret"], {}, "name that key in the file"),
        ([], {"VLLM_API_KEY": "secret"}, "name that key in the file"),
    ],
)
def test_keys_are_refused_beside_another_lock(
    keys: Path, words: list[str], environment: dict[str, str], said: str
) -> None:
    assert serve("--keys", str(keys)).exit_code == 0
    assert said in refusal("--keys", str(keys), *words, **environment)


def test_index_of_one_tenant_is_refused_to_several(keys: Path, tmp_path: Path) -> None:
    (tmp_path / "catalogue.sqlite").touch()
    assert "the index of one tenant" in refusal("--keys", str(keys), "--index", str(tmp_path))


def test_wrong_line_of_keys_starts_no_server(keys: Path) -> None:
    keys.write_text(KEY.replace("ask", "aks"))
    assert "line 1: unknown right 'aks'; did you mean ask?" in refusal("--keys", str(keys))


@pytest.mark.parametrize(("words", "environment"), [(["--grpc"], {}), ([], {"VLLM_USE_RUST_FRONTEND": "1"})])
def test_server_without_plugins_is_not_started(words: list[str], environment: dict[str, str]) -> None:
    """It would blend nothing, and ask for no key."""
    assert "take no plugins" in refusal(*words, **environment)
