"""Names become model folders, or one line that says what is wrong."""

from __future__ import annotations

import json
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from blendrag import models
from blendrag.errors import ConfigError, MissingDependencyError, ModelError, ModelNotFoundError
from blendrag.models import (
    DEFAULT_EMBEDDER,
    DEFAULT_MODEL,
    load_tokenizer,
    model_digest,
    model_window,
    resolve_embedder,
    resolve_model,
)
from blendrag.serving.identity import kv_identity
from blendrag.settings import Settings
from closed import flip


def make_model(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(256, 64, generator=generator) for name in ("a.weight", "b.weight")}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_packaged_default_is_complete_and_speaks_the_chat_template(tokenizer: Any) -> None:
    folder = resolve_model(DEFAULT_MODEL, Settings.load().cache_dir)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_is_read_once_and_anew_when_its_files_change(model_dir: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_dir / name, tmp_path)
    first = load_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path) is first
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    changed = load_tokenizer(tmp_path)
    assert changed.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False) == "Hello!"


def test_default_is_unpacked_once_also_when_several_ask_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def dequantise(gguf: Path, into: Path) -> None:
        calls.append(gguf.name)
        time.sleep(0.2)
        into.rmdir()
        make_model(into)

    monkeypatch.setattr(models, "_dequantise", dequantise)
    told: list[str] = []
    names = [DEFAULT_MODEL, "SmolLM2-135M-Instruct"] * 2
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda name: resolve_model(name, tmp_path, progress=told.append), names))
    folders.add(resolve_model("SmolLM2-135M-Instruct", tmp_path, progress=told.append))
    assert calls == ["SmolLM2-135M-Instruct.Q4_1.gguf"] and len(folders) == len(told) == 1


def test_interrupted_unpacking_leaves_nothing_that_counts_as_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf: Path, into: Path) -> None:
        (into / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_dequantise", fail)
    with pytest.raises(KeyboardInterrupt):
        resolve_model(DEFAULT_MODEL, tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("folder", ["/proc/blendrag", "/dev/null/cache"])
def test_cache_folder_that_cannot_be_written_is_named_with_its_setting(folder: str) -> None:
    with pytest.raises(ConfigError, match=rf"{folder}/models.*cache_dir, BLENDRAG_CACHE_DIR"):
        resolve_model(DEFAULT_MODEL, Path(folder))


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_disk_without_room_for_the_packaged_model_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def full(*_: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(models, "_dequantise", full)
    if when == "before":
        room = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    with pytest.raises(ConfigError, match=r"MiB\) into .*No space left.*cache_dir"):
        resolve_model(DEFAULT_MODEL, tmp_path)
    assert not list(tmp_path.glob("models/*smollm2*/")) and not list(tmp_path.glob("models/.*"))


def test_user_without_a_home_has_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> Any:
        raise KeyError("uid not found")

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert Settings.load().cache_dir == Path("/.cache/blendrag")


def test_missing_package_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "GGUF_PACKAGE", "no_such_package")
    with pytest.raises(MissingDependencyError, match=r"blendrag\[demo\]"):
        resolve_model(DEFAULT_MODEL, tmp_path)


def test_local_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "org" / "model")
    monkeypatch.chdir(tmp_path)
    assert resolve_model(str(folder), tmp_path) == folder
    assert resolve_model("org/model", tmp_path) == folder  # a folder wins over a hub id of the same name


SHARDS = {"a.weight": "model.safetensors", "b.weight": "model-00002-of-00002.safetensors"}


@pytest.mark.parametrize(
    ("removed", "written", "named", "message"),
    [
        ("config.json", None, "", "no config.json"),
        ("model.safetensors", None, "", r"no \*\.safetensors weights$"),
        ("model.safetensors", "pytorch_model.bin", "", "pickled weights are not read"),
        (None, "model.safetensors.index.json", "", "lacks 1 of 2 weights files, such as model-00002-of-0"),
        (None, None, "config.json", r"config\.json is not a model folder: it is a file"),
        (None, None, "..", "did you mean its folder Qwen-0.5B"),
        (None, None, "../qwen-05B", r"did you mean Qwen-0\.5B\?"),
        (None, None, "../" + 300 * "x", "cannot read the model folder .*: File name too long"),
    ],
)
def test_folder_that_is_no_whole_model_says_what_is_wrong(
    tmp_path: Path, removed: str | None, written: str | None, named: str, message: str
) -> None:
    folder = make_model(tmp_path / "download" / "Qwen-0.5B")
    if removed:
        (folder / removed).unlink()
    if written:
        (folder / written).write_text(json.dumps({"weight_map": SHARDS}))
    with pytest.raises(ModelNotFoundError, match=message):
        resolve_model(str(folder / named), tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "tokenizer.json"])
@pytest.mark.parametrize("text", ["version https://git-lfs.github.com/spec/v1", "[]", ""])
def test_file_of_a_model_that_cannot_be_read_is_named_with_its_folder(
    tmp_path: Path, model_dir: Path, name: str, text: str
) -> None:
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_dir / file, tmp_path)
    (tmp_path / "model.safetensors").symlink_to(model_dir / "model.safetensors")
    (tmp_path / name).write_text(text)
    what = re.escape(str(tmp_path)) if name == "tokenizer.json" else re.escape(str(tmp_path / name))
    with pytest.raises(ModelError, match=f"{what}.*download"):
        load_tokenizer(resolve_model(str(tmp_path), tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135m-instuct", f"did you mean {DEFAULT_MODEL}"),
        ("someone/some-model", "not in the hub's local cache"),
        ("not a name", "cannot be a hub id"),
        ("", "cannot be a hub id"),
    ],
)
def test_unknown_name_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match=message) as caught:
        resolve_model(name, tmp_path)
    assert "\n" not in str(caught.value)


def test_embedder_is_the_packaged_one_or_a_folder_that_exists_or_a_hub_id(tmp_path: Path) -> None:
    assert (Path(resolve_embedder(DEFAULT_EMBEDDER)) / "modules.json").is_file()
    assert resolve_embedder(str(tmp_path)) == str(tmp_path)
    assert resolve_embedder("BAAI/bge-small-en") == "BAAI/bge-small-en"
    with pytest.raises(ModelNotFoundError, match="no embedder folder"):
        resolve_embedder(str(tmp_path / "nowhere"))


def test_digest_survives_a_copy_and_no_change_of_config_or_weights(tmp_path: Path) -> None:
    one = make_model(tmp_path / "one", transformers_version="5.18")
    other = make_model(tmp_path / "other", transformers_version="5.19")
    assert model_digest(one) == model_digest(other) != model_digest(make_model(tmp_path / "3", rope_theta=5))
    flip(other / "model.safetensors", -1)
    assert model_digest(one) != model_digest(other)


@pytest.mark.parametrize("keep", [0, 4, 20, 60_000])
def test_cut_weights_are_reported_and_not_digested(tmp_path: Path, keep: int) -> None:
    weights = make_model(tmp_path / "model") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(ModelNotFoundError, match=r"model\.safetensors"):
        model_digest(weights.parent)


@pytest.mark.parametrize(
    ("rope", "others", "window"),
    [
        ({"rope_parameters": {"rope_type": "longrope"}}, {"original_max_position_embeddings": 4096}, 4096),
        ({"rope_scaling": {"type": "su"}}, {"original_max_position_embeddings": 4096}, 4096),
        ({"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}, {}, 131072),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}},
            {"original_max_position_embeddings": 4096},
            4096,
        ),
    ],
)
def test_kv_of_long_rope_is_told_apart_by_the_angles_that_vllm_takes_for_the_window(
    tmp_path: Path, rope: dict[str, Any], others: dict[str, Any], window: int
) -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 64}
    folder = make_model(tmp_path / "model", **sizes, **rope, **others, max_position_embeddings=131072)
    assert model_window(folder) == window

    def identity(window: int | None) -> str:
        return kv_identity(Settings.load(model=str(folder), max_model_len=window), folder).digest()

    assert identity(2048) == identity(4096) != identity(4097) == identity(131072)
    assert identity(None) == identity(window)
