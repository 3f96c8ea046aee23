"""One engine for the whole run, a store with real chunks in it.

The engine computes in float32: what has to be equal is equal to many digits, and greedy texts do not hang
on ties.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from workbench import Bench, Piece, real_texts

from blendrag.engine.handle import Engine
from blendrag.index.identity import kv_identity
from blendrag.settings import Settings
from blendrag.store.identity import KVIdentity

# Few tokens per step: prompts of usual length are prefilled in several chunks.
ENGINE = {"dtype": "float32", "max_model_len": 4096, "kv_cache_gib": 1, "max_num_batched_tokens": 512}


@pytest.fixture(scope="session")
def engine_options() -> dict[str, Any]:
    """Settings with which ``Engine.shared`` gives the one engine of the run."""
    return dict(ENGINE)


@pytest.fixture(scope="session")
def settings(engine_options: dict[str, Any]) -> Settings:
    return Settings.load(**engine_options)


@pytest.fixture(scope="session")
def engine(settings: Settings, model_dir: Path) -> Iterator[Engine]:
    shared = Engine.shared(settings)
    yield shared
    shared.release()


@pytest.fixture(scope="session")
def identity(settings: Settings, model_dir: Path) -> KVIdentity:
    return kv_identity(settings, model_dir)


@pytest.fixture(scope="session")
def chunks(tokenizer: Any, identity: KVIdentity) -> list[Piece]:
    """At least 24 chunks of real text."""
    pieces = [Piece(identity.chunk_key(ids), ids) for ids in real_texts(tokenizer)]
    assert len(pieces) >= 24
    return pieces


@pytest.fixture(scope="session")
def bench(
    engine: Engine,
    tokenizer: Any,
    identity: KVIdentity,
    chunks: list[Piece],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Bench]:
    """All chunks stored and in RAM."""
    opened = Bench(engine, tokenizer, identity, tmp_path_factory.mktemp("kb"), chunks).open()
    yield opened
    opened.close()


@pytest.fixture
def own_bench(
    engine: Engine, tokenizer: Any, identity: KVIdentity, chunks: list[Piece], tmp_path: Path
) -> Iterator[Bench]:
    """Six chunks in a store of the test's own, without a RAM tier: every use is a read from disk."""
    opened = Bench(engine, tokenizer, identity, tmp_path / "kb", chunks[:6]).open(ram_bytes=0)
    yield opened
    opened.close()
