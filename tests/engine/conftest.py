"""A store with real chunks in it, on the one engine of the run; and one server for all of its clients."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from blendrag import BlendIndex
from blendrag.cli.app import app
from blendrag.engine.client.engine import Engine
from blendrag.eviction.fitted import Fitted, fitted_file, save_fitted
from blendrag.forecast.features import features_of
from blendrag.lab.eviction.fit_predictor import train_on_file
from blendrag.models import DEFAULT_EMBEDDER
from blendrag.serving.identity import kv_identity
from blendrag.settings import Settings
from blendrag.store.contexts import Chunk
from blendrag.store.identity import KVIdentity
from lora_adapter import make_adapter
from one_engine import variables
from served import TEXTS, Server
from word_embedder import write_dialogs
from workbench import Bench, Open, real_texts


@pytest.fixture(scope="session")
def identity(settings: Settings, model_dir: Path) -> KVIdentity:
    return kv_identity(settings, model_dir)


@pytest.fixture(scope="session")
def chunks(tokenizer: Any, identity: KVIdentity) -> list[Chunk]:
    """At least 24 chunks of real text."""
    pieces = [Chunk(identity.chunk_key(ids), "", ids) for ids in real_texts(tokenizer)]
    assert len(pieces) >= 24
    return pieces


@pytest.fixture(scope="session")
def bench(
    engine: Engine,
    tokenizer: Any,
    identity: KVIdentity,
    chunks: list[Chunk],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Bench]:
    """All chunks stored and in RAM."""
    opened = Bench(engine, tokenizer, identity, tmp_path_factory.mktemp("kb"), chunks).open()
    yield opened
    opened.close()


@pytest.fixture
def own_bench(
    engine: Engine, tokenizer: Any, identity: KVIdentity, chunks: list[Chunk], tmp_path: Path
) -> Iterator[Bench]:
    """Six chunks in a store of the test's own, without a RAM tier: every use is a read from disk."""
    opened = Bench(engine, tokenizer, identity, tmp_path / "kb", chunks[:6]).open(ram_bytes=0)
    yield opened
    opened.close()


@pytest.fixture
def open_index(engine_options: dict[str, Any], bench: Bench, tmp_path: Path) -> Iterator[Open]:
    """Opens indexes (by default always the same) that share the run's engine."""
    opened: list[BlendIndex] = []

    def open_one(name: str = "index", **options: Any) -> BlendIndex:
        small = {"chunk_tokens": 64, "min_cached_tokens": 16, "similarity_top_k": 4, "max_tokens": 8}
        index = BlendIndex.open(tmp_path / name, **{**engine_options, **small, **options})
        opened.append(index)
        return index

    yield open_one
    for index in opened:
        index.close()


@pytest.fixture
def command(engine: Engine, engine_options: dict[str, Any]) -> Callable[..., Result]:
    """``blendrag`` with these words, on the run's engine. Fails if it does."""
    options = variables(engine_options)

    def run(*words: str, **environment: str) -> Result:
        env = {**options, "COLUMNS": "120", "NO_COLOR": "1", **environment}
        result = CliRunner(env=env).invoke(app, list(words))
        assert result.exit_code == 0, result.stderr
        return result

    return run


@pytest.fixture(scope="session")
def texts(tokenizer: Any) -> list[str]:
    """Eight passages of about 160 tokens."""
    return [tokenizer.decode(ids) for ids in real_texts(tokenizer, tokens=160, per_package=1)][:8]


@pytest.fixture
def folder(tmp_path: Path, texts: list[str]) -> Path:
    """Five text files, of about three chunks each."""
    path = tmp_path / "documents"
    path.mkdir()
    for number, text in enumerate(texts[:5]):
        (path / f"{number}.txt").write_text(text)
    return path


@pytest.fixture(scope="session")
def adapter(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the packaged model, to every third layer's output projection."""
    size = json.loads((model_dir / "config.json").read_text())["hidden_size"]
    names = [f"model.layers.{layer}.self_attn.o_proj" for layer in range(0, 30, 3)]
    return make_adapter(tmp_path_factory.mktemp("adapter") / "lora", dict.fromkeys(names, (size, size)))


@pytest.fixture(scope="session")
def cache(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the models of all tests, and a predictor of its own."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "models").symlink_to(Settings.load().cache_dir.expanduser() / "models")
    dialogs = write_dialogs(folder / "dialogs.jsonl", 60)
    trained = train_on_file(dialogs, features_of(DEFAULT_EMBEDDER), held_out=0.0)
    save_fitted(fitted_file(folder), Fitted(trained.classifier, trained.embedder))
    return folder


@pytest.fixture(scope="session")
def server(adapter: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``blendrag serve`` with an adapter in its model, forecasts and a store of responses."""
    tiers = [{"kind": "ram", "bytes": 2 << 30, "policy": "lpc"}, {"kind": "disk", "policy": "lpc"}]
    more = ("--lora", str(adapter), "--tiers", json.dumps(tiers), "--outcome-log", "--cache-dir", str(cache))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
        running = Server(tmp_path_factory.mktemp("server") / "kv", *more)
    running.wait()
    assert running.put(TEXTS)["chunks"] == len(TEXTS)
    yield running
    if running.process.poll() is None:
        running.end()
