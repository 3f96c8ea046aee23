"""What blends compute on a GPU, against a CPU, and how fast: kernel, codecs, loader, selectors. Without vLLM.

The tests of those modules run on the GPU, too; here are the sizes that people have.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from blendrag.attention.paged import paged_attention
from blendrag.attention.question import question_attention
from blendrag.attention.runs import dense_attention
from blendrag.attention.scores import Scores
from blendrag.lab.bench.model import GPUS, measure
from blendrag.load.loader import LayerLoader, LoadSpan
from blendrag.load.trace import Trace
from blendrag.options import BlendOptions
from blendrag.select import CachedTokens, make_selector
from blendrag.select.deviation import deviation
from blendrag.store.codec import CODECS, Codec, make_codec
from blendrag.store.identity import KVIdentity
from blendrag.store.kv_store import KVStore
from blendrag.store.record import Record
from blendrag.store.tiers import Opened, TierSpec
from device import DEVICE, needs_kernels
from paged_cache import Cache
from stores import Chunk, get, make_chunk, open_stack, put, register, wanted
from tables import Tables

if DEVICE == "cuda":  # one layer, or all, of Llama-3-8B
    LENGTHS, HEADS, KV_HEADS, SIZE, LAYERS, DTYPE = (4096, 32_768), 32, 8, 128, 32, torch.bfloat16
else:  # Triton's interpreter is slow, and has no bfloat16
    LENGTHS, HEADS, KV_HEADS, SIZE, LAYERS, DTYPE = (64, 150), 4, 2, 16, 3, torch.float32
CHUNKS, CHUNK_TOKENS = 8, LENGTHS[0] // 8
SHARE = 0.15  # of the tokens are recomputed
EPS = torch.finfo(DTYPE).eps  # what one rounding may change
ASKING = 32  # tokens of a question
OTHERS = 0.05  # of the tokens may be others: which are the last ones taken hangs on the last digits
CHECKED = 64  # rows of the kernel: the CPU would take minutes for all


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


def milliseconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Median, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        work()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[1:])


def largest(difference: torch.Tensor) -> float:
    return float(difference.float().abs().max())


@needs_kernels
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_rows_of_a_long_prompt_attend_rightly(tables: Tables, layout: str, length: int) -> None:
    cache = Cache([length], KV_HEADS, SIZE, 16, layout, length, DTYPE)
    count = round(SHARE * length)
    at = torch.randperm(length, generator=torch.Generator().manual_seed(1))[:count].sort().values
    rows, scores = cache.rows(at, torch.zeros_like(at)), Scores(SIZE**-0.5)
    query = random(count, HEADS, SIZE)
    moved = query.to(DEVICE)

    def attend() -> torch.Tensor:
        return paged_attention(moved, cache.key, cache.value, rows, scores)

    some = torch.linspace(0, count - 1, min(CHECKED, count)).long()
    exact = dense_attention(query[some], *cache.whole[0], at[some], scores)
    error, limit = largest(attend().cpu()[some] - exact), 8 * EPS
    tables.add(
        kernel=layout,
        keys=f"{length:,}",
        rows=f"{count:,}",
        error=f"{error:.1e}",
        limit=f"{limit:.1e}",
        ms=f"{milliseconds(attend):.2f}",
        all_rows_by_PyTorch_ms=f"{milliseconds(causal(length)):.2f}",
    )
    assert error <= limit


def causal(length: int) -> Callable[[], torch.Tensor]:
    """What a layer of full prefill takes for attention."""
    heads = (HEADS, KV_HEADS, KV_HEADS)
    query, key, value = (torch.ones(1, n, length, SIZE, dtype=DTYPE, device=DEVICE) for n in heads)
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(query, key, value, is_causal=True, enable_gqa=True)


@pytest.mark.skipif(DEVICE == "cpu", reason="the rates of a GPU")
def test_rates_are_those_that_the_model_of_the_time_takes(tables: Tables) -> None:
    """Estimate beside measurement: shown, since another GPU has others."""
    name = torch.cuda.get_device_name()
    stated = [gpu for gpu in GPUS.values() if gpu.name.split()[-1] in name] or [GPUS["H100"]]
    expected, found = asdict(stated[0].rates), asdict(measure(torch.device(DEVICE)))
    for rate in ("large", "few", "memory", "link", "copy", "launch_s"):
        tables.add(
            **{f"rate of {name}": rate, stated[0].name: f"{expected[rate]:.3g}", "here": f"{found[rate]:.3g}"}
        )
    assert min(found.values()) > 0


@pytest.mark.parametrize("name", sorted(CODECS))
def test_codec_loses_no_more_on_a_gpu_and_reads_what_a_cpu_stored(tables: Tables, name: str) -> None:
    codec = make_codec(name, KV_HEADS, SIZE, DTYPE)
    kv = random(LAYERS, 2, CHUNK_TOKENS, KV_HEADS, SIZE)
    moved = kv.to(DEVICE)
    rows, own = codec.encode(kv), codec.encode(moved)
    on_cpu, found = decoded(codec, rows), decoded(codec, own)
    error, expected = largest(found.cpu() - kv), largest(on_cpu - kv)
    otherwise = largest(decoded(codec, rows.to(DEVICE)).cpu() - on_cpu)
    limit = 2 * EPS * largest(kv)  # one product and one sum, rounded twice or once
    size = kv.nbytes / 1e6
    tables.add(
        codec=name,
        error=f"{error:.1e}",
        on_a_CPU=f"{expected:.1e}",
        reads_otherwise=f"{otherwise:.1e}",
        limit=f"{limit:.1e}",
        encode_GB_per_s=f"{size / milliseconds(lambda: codec.encode(moved)):.2f}",
        decode_GB_per_s=f"{size / milliseconds(lambda: decoded(codec, own)):.2f}",
    )
    assert error <= expected + limit and otherwise <= limit


def decoded(codec: Codec, rows: torch.Tensor) -> torch.Tensor:
    """[layers, 2, tokens, heads, size], on the device of the rows."""
    kv = torch.empty(len(rows), 2, CHUNK_TOKENS, KV_HEADS, SIZE, dtype=DTYPE, device=rows.device)
    for row, (key, value) in zip(rows, kv, strict=True):
        codec.decode(row, CHUNK_TOKENS, key, value)
    return kv


@pytest.mark.parametrize("name", sorted(CODECS))
def test_layer_is_the_same_after_its_way_to_the_gpu(tables: Tables, tmp_path: Path, name: str) -> None:
    identity = KVIdentity("shape", "weights", "dtype", LAYERS, KV_HEADS, SIZE, codec=name)
    chunks = [make_chunk(seed, CHUNK_TOKENS, DTYPE, identity) for seed in range(CHUNKS)]
    register(tmp_path, chunks, identity=identity)
    stack = TierSpec(kind="ram", bytes=1 << 40), TierSpec(kind="disk")
    store = open_stack(tmp_path, *stack, identity=identity, dtype=str(DTYPE).removeprefix("torch."))
    put(store, *chunks)
    loader = LayerLoader()

    def load(use: Callable[[int, torch.Tensor], None]) -> None:
        opened = [one for one in store.open_records(wanted(*chunks)) if isinstance(one, Opened)]
        spans = [LoadSpan(one, CHUNK_TOKENS) for one in opened]
        with loader.load(spans, store.layout, torch.device(DEVICE), Trace()) as layers:
            layers.fetch_kv(0)
            for number in range(LAYERS):
                use(number, torch.stack(layers.synchronize(number)))

    found: dict[int, torch.Tensor] = {}
    load(lambda number, kv: found.update({number: kv.cpu()}))
    whole = stored(store, chunks)
    error = max(largest(found[number] - whole[number]) for number in range(LAYERS))
    limit = 0.0 if name == "raw" else 2 * EPS * largest(whole)
    pinned = whole.pin_memory() if DEVICE == "cuda" else whole
    size, taken = whole.nbytes / 1e6, milliseconds(lambda: load(lambda *_: None))
    store.close()
    tables.add(
        loader=name,
        MB=f"{size:,.1f}",
        error=f"{error:.1e}",
        limit=f"{limit:.1e}",
        ms=f"{taken:.2f}",
        GB_per_s=f"{size / taken:.2f}",
        copy_GB_per_s=f"{size / milliseconds(lambda: pinned.to(DEVICE, non_blocking=True, copy=True)):.2f}",
    )
    assert error <= limit


def stored(store: KVStore, chunks: list[Chunk]) -> torch.Tensor:
    """[layers, 2, tokens, heads, size] of all chunks, decoded on the CPU."""
    records = [get(store, chunk) for chunk in chunks]
    return torch.cat([one.decode() for one in records if isinstance(one, Record)], dim=2)


@pytest.mark.parametrize("length", LENGTHS)
def test_scores_of_a_gpu_lead_selectors_to_the_same_tokens(tables: Tables, length: int) -> None:
    fresh, stored = (random(length, KV_HEADS, SIZE, seed=seed) for seed in (1, 2))
    asking = random(ASKING, KV_HEADS, SIZE)
    query, at = random(ASKING, HEADS, SIZE, seed=3), torch.arange(length, length + ASKING)

    def deviates(device: str) -> torch.Tensor:
        own, other = fresh.to(device), stored.to(device)
        return deviation("v", (own, own), (other, other))[0].cpu()

    def attends(device: str) -> torch.Tensor:
        cached = stored.to(device), torch.arange(length, device=device)
        own = asking.to(device), at.to(device)
        scores = Scores(SIZE**-0.5)
        return question_attention(query.to(device), at.to(device), *cached, *own, scores).cpu()

    # Sums in float32; and a softmax of what was rounded to the type of the keys, summed.
    for name, scores, limit in (("hkvd", deviates, 1e-5), ("query", attends, 16 * EPS)):
        expected, found = scores("cpu"), scores(DEVICE)
        error = largest(found - expected) / largest(expected)
        wanted, taken = selected(name, expected), selected(name, found)
        tables.add(
            selector=name,
            tokens=f"{length:,}",
            error=f"{error:.1e}",
            limit=f"{limit:.1e}",
            recomputed=f"{len(taken):,}",
            others=f"{len(taken - wanted):,}",
        )
        assert error <= limit and len(taken - wanted) <= len(wanted) * OTHERS


def selected(name: str, scores: torch.Tensor) -> set[int]:
    places = torch.arange(len(scores))
    tokens = CachedTokens(places, torch.full_like(places, len(scores)), len(scores), scores, 1.0, scores)
    selector = make_selector(BlendOptions(SHARE, selector=name))
    return set(selector.select(selector.check_layers(LAYERS)[0], tokens).tolist())
