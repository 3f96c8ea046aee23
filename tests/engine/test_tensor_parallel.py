"""An engine of two ranks against one of one rank: a small model with random weights, in float32."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.generation import Delta, Sampling
from blendrag.engine.client.launch import WorkerExtension
from blendrag.engine.client.stores import StoreClient
from blendrag.errors import EngineError, StoreFullError
from blendrag.lab.doctor import run_doctor
from blendrag.serving.identity import kv_identity
from blendrag.settings import Settings
from blendrag.store.catalogue import Catalogue
from blendrag.store.contexts import Chunk
from blendrag.store.kv_reader import KVReader
from blendrag.store.record import Record
from blendrag.store.stack import OWN_FOLDER, TierSpec
from model_shapes import SHAPES
from quantised_model import small_model
from workbench import Bench, Prompt, real_texts

pytestmark = [
    pytest.mark.own_engine,
    pytest.mark.nightly(part="ranks"),
    pytest.mark.timeout(1500),
]

PROMPTS = 20
TEXT = Sampling(max_tokens=32, other={"ignore_eos": True})
SELECTORS = ("hkvd", "query")
EXTENSION = WorkerExtension("watched_ranks.WatchedRank")


@dataclass
class Run:
    """tokens: by prompt, at ratio 1. blended: by selector and prompt, at the default ratio, with what was
    chosen."""

    tokens: list[list[int]]
    blended: dict[str, list[tuple[list[int], list[list[int]]]]]


def settings(model: Path, ranks: int) -> Settings:
    return Settings.load(
        model=str(model),
        dtype="float32",
        max_model_len=2048,
        kv_cache_gib=1,
        engine_args={"tensor_parallel_size": ranks},
    )


def prompts(bench: Bench) -> list[Prompt]:
    pieces = bench.pieces
    return [bench.prompt([pieces[(at + step) % len(pieces)] for step in (0, 3, 7)]) for at in range(PROMPTS)]


def blend(bench: Bench, prompt: Prompt, **options: Any) -> tuple[list[int], list[list[int]]]:
    bench.engine.call("take_chosen")
    tokens = bench.blended(prompt, TEXT, **options).token_ids
    return tokens, bench.engine.call("take_chosen")


def run(bench: Bench) -> Run:
    asked = prompts(bench)
    exact = [bench.blended(prompt, TEXT, ratio=1.0).token_ids for prompt in asked]
    blended = {name: [blend(bench, prompt, selector=name) for prompt in asked] for name in SELECTORS}
    return Run(exact, blended)


@contextlib.contextmanager
def engine_of(model: Path, ranks: int) -> Iterator[Engine]:
    engine = Engine(settings(model, ranks), None, EXTENSION)
    try:
        assert engine.blends, engine.facts.reason
        yield engine
    finally:
        engine.close()


def chunks_of(bench: Bench) -> list[Chunk]:
    pieces = [Chunk(bench.identity.chunk_key(ids), "", ids) for ids in real_texts(bench.tokenizer)]
    return pieces[:24]


def bench_of(engine: Engine, tokenizer: Any, root: Path) -> Bench:
    bench = Bench(engine, tokenizer, kv_identity(engine.settings, engine.model_path), root)
    bench.pieces = chunks_of(bench)
    return bench.open()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return small_model(tmp_path_factory.mktemp("ranks") / "model", tokenizer)


@pytest.fixture(scope="module")
def alone(model: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """The store of an engine of one rank, and what it generates."""
    root = tmp_path_factory.mktemp("alone")
    with engine_of(model, 1) as engine:
        bench = bench_of(engine, tokenizer, root)
        made = run(bench)
        bench.close()
    return root, made


@pytest.fixture(scope="module")
def bench(
    model: Path, tokenizer: Any, alone: tuple[Path, Run], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """Two ranks with a store of their own."""
    with engine_of(model, 2) as engine:
        yield bench_of(engine, tokenizer, tmp_path_factory.mktemp("together"))


@pytest.fixture(scope="module")
def together(bench: Bench) -> Run:
    return run(bench)


def test_two_ranks_generate_the_same_text_at_ratio_1(alone: tuple[Path, Run], together: Run) -> None:
    assert together.tokens == alone[1].tokens
    assert {len(tokens) for tokens in together.tokens} == {32}


@pytest.mark.parametrize("selector", SELECTORS)
def test_two_ranks_recompute_the_same_tokens(alone: tuple[Path, Run], together: Run, selector: str) -> None:
    same = chosen = equal = tokens = 0
    for (text, choices), (other, others) in zip(
        alone[1].blended[selector], together.blended[selector], strict=True
    ):
        assert choices and len(choices) == len(others)
        for first, second in zip(choices, others, strict=True):
            chosen += len(first)
            same += len(set(first) & set(second))
        tokens += len(text)
        equal += sum(a == b for a, b in zip(text, other, strict=True))
    assert same >= 0.99 * chosen > 0
    assert equal >= 0.99 * tokens


def kv_by_key(root: Path, bench: Bench) -> dict[str, Record]:
    """As an engine of one rank reads it."""
    reader = KVReader.open(root, bench.identity, "float32", OWN_FOLDER)
    found = {piece.key: reader.get(piece.key, piece.token_ids) for piece in bench.pieces}
    reader.close()
    return {key: record for key, record in found.items() if isinstance(record, Record)}


def test_one_rank_reads_the_kv_that_two_have_written(alone: tuple[Path, Run], bench: Bench) -> None:
    ours, theirs = kv_by_key(alone[0], bench), kv_by_key(bench.root, bench)
    assert ours.keys() == theirs.keys() == {piece.key for piece in bench.pieces}
    for key, record in ours.items():
        assert (record.head.shards, theirs[key].head.shards) == (1, 2)
        torch.testing.assert_close(theirs[key].decode(), record.decode(), rtol=1e-3, atol=1e-4)


def test_two_ranks_read_the_same_text_from_the_store_of_one(
    alone: tuple[Path, Run], bench: Bench, together: Run
) -> None:
    root, _ = alone
    stack = [TierSpec(kind="ram", bytes=1 << 28), TierSpec(kind="disk")]
    client = StoreClient.open(bench.engine, root, bench.identity, stack)
    reader = Bench(bench.engine, bench.tokenizer, bench.identity, root, bench.pieces)
    reader.client = client
    for tier in ("disk", "ram"):
        for at, prompt in enumerate(prompts(reader)[:4]):
            bench.reset()
            found = bench.engine.generate(prompt.token_ids, TEXT, reader.recipe(prompt, selector="hkvd"))
            assert found.report is not None and not found.report.problem
            assert tier in found.report.tiers
            assert found.token_ids == together.blended["hkvd"][at][0]
    client.close()


def damage(bench: Bench, piece: Chunk) -> Path:
    """Of the second rank's part alone."""
    bench.client.empty_ram()
    (file,) = bench.root.glob(f"kv/??/{piece.key}*")
    record = bytearray(file.read_bytes())
    record[-1] ^= 1  # the last layer of the last shard
    file.write_bytes(record)
    return file


def without(prompt: Prompt, piece: Chunk) -> Prompt:
    """The same tokens, and nothing stored of this chunk."""
    return Prompt(prompt.token_ids, tuple(span for span in prompt.spans if span[0] != piece.key))


async def beside_another(bench: Bench, prompt: Prompt) -> Delta:
    """Blended while another answer is generated."""
    long = Sampling(max_tokens=1500, other={"ignore_eos": True})
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in bench.engine.astream(bench.encode("Once upon a time"), long):
            begun.set()

    task = asyncio.create_task(read())
    await begun.wait()
    try:
        return await bench.engine.agenerate(prompt.token_ids, TEXT, bench.recipe(prompt))
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("sliced", [False, True], ids=["at once", "sliced"])
@pytest.mark.usefixtures("together")
def test_record_damaged_for_one_rank_is_missed_by_both_and_repaired(bench: Bench, sliced: bool) -> None:
    hurt = bench.pieces[3]
    prompt = bench.prompt(bench.pieces[:6])
    right = bench.blended(without(prompt, hurt), TEXT)
    file = damage(bench, hurt)
    bench.reset()
    found = asyncio.run(beside_another(bench, prompt)) if sliced else bench.blended(prompt, TEXT)
    assert found.report is not None and found.report.missing == {hurt.key: "damaged"}
    assert not sliced or found.report.slices > 1
    assert found.token_ids == right.token_ids
    assert not file.exists()
    assert pending(bench) == [hurt.key]
    bench.ingest([hurt])
    assert not (bench.blended(prompt, TEXT).report or found.report).problem


def pending(bench: Bench) -> list[str]:
    catalogue = Catalogue.open(bench.root, bench.identity)
    keys = [entry.key for entry in catalogue.pending()]
    catalogue.close()
    return keys


def test_chunk_that_one_rank_lacks_is_used_by_neither(bench: Bench) -> None:
    lost = bench.pieces[3]  # behind the last document begins what the selector takes for the question
    prompt = bench.prompt(bench.pieces[:6])
    right = bench.blended(without(prompt, lost), TEXT)
    bench.client.empty_ram()
    bench.ingest([lost])  # to the owner's RAM, and to disk
    (file,) = bench.root.glob(f"kv/??/{lost.key}*")
    file.unlink()
    for waiting in ([], [lost.key]):
        found = bench.blended(prompt, TEXT)
        assert found.report is not None and found.report.missing == {lost.key: "missing"}
        assert found.token_ids == right.token_ids
        assert pending(bench) == waiting, (
            "the first time, the owner has it, and learns that the other has not"
        )
    bench.ingest([lost])
    assert not (bench.blended(prompt, TEXT).report or found.report).problem


def test_sliced_blend_of_two_ranks_is_the_same(bench: Bench, together: Run) -> None:
    bench.reset()
    prompt = prompts(bench)[0]
    found = asyncio.run(beside_another(bench, prompt))
    assert found.report is not None and found.report.slices > 1
    assert found.token_ids == together.blended["hkvd"][0][0]


def test_recipe_that_no_rank_can_follow_ends_in_plain_prefills_answer(bench: Bench) -> None:
    prompt = prompts(bench)[1]
    full = bench.plain(prompt, TEXT)
    bench.reset()
    found = bench.engine.generate(prompt.token_ids, TEXT, bench.recipe(prompt, selector="best"))
    assert found.report is not None and "best" in (found.report.fallback or "")
    assert found.token_ids == full.token_ids


def test_full_store_is_met_by_every_rank(bench: Bench, tmp_path: Path) -> None:
    catalogue = Catalogue.open(tmp_path, bench.identity)
    catalogue.register("tests", bench.pieces[:2])
    catalogue.close()
    small = StoreClient.open(bench.engine, tmp_path, bench.identity, [TierSpec(kind="disk", bytes=1000)])
    small.ingest(bench.pieces[:2])
    with pytest.raises(StoreFullError, match="more than the disk tier may hold"):
        small.flush()
    assert small.ingest([]).tokens == 0
    assert small.delete([bench.pieces[0].key]).chunks == 0
    small.close()


def test_rank_that_fails_alone_ends_the_engine_in_time(bench: Bench) -> None:
    """Last, as it ends the engine: within its limit, and not in the five minutes that vLLM would wait."""
    prompt = prompts(bench)[2]
    bench.reset()
    bench.engine.call("fail", 1)
    limit = Sampling(max_tokens=1, timeout_s=120.0)
    with pytest.raises(EngineError, match="generating"):
        bench.engine.generate(prompt.token_ids, limit, bench.recipe(prompt))
    assert not bench.engine.alive


@pytest.mark.parametrize(
    ("title", "exact"),
    [
        ("gpt-oss", ""),
        ("Gemma 4 E2B, E4B", ""),
        ("DeepSeek V3, R1, Kimi K2", "exact prefix, stored and put back, KL"),
        ("SmolLM 3", "exact prefix, stored and put back, KL"),
    ],
)
def test_two_ranks_of_other_structures_pass_the_doctor(
    title: str, exact: str, tmp_path: Path, tokenizer: Any
) -> None:
    """Windows with sinks, layers that share KV, latent KV, Transformers' own layers. exact: the check of
    exact prefixes, if they are kept."""
    (shape,) = (each for each in SHAPES if each.title == title)
    made = replace(shape, reader=None).settings(tmp_path, tokenizer)
    arguments = {**made.engine_args, "tensor_parallel_size": 2}
    report = run_doctor(made.model_copy(update={"dtype": "float32", "engine_args": arguments}))
    assert report.passed, [row for row in report.rows if not row.ok]
    assert not exact or exact in {row.check for row in report.rows}
