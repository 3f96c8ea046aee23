"""A model of the time to the first token on GPUs: what the code launches and moves, counted, over what a GPU
is stated to do. It says when not to blend.

What a blend launches is counted by ``tests/unit/engine/test_crossings.py``, which fails where it is not what
stands here.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from rich.table import Table

from blendrag.errors import ConfigError
from blendrag.lab.options import ModelOptions
from blendrag.lab.results import Results
from blendrag.options import STEPS
from blendrag.store.codec import make_codec
from blendrag.tables import table_with

CHUNK_TOKENS, FRESH_TOKENS, QUESTION_TOKENS = 512, 100, 75
DISK = 2.8e9
"""Bytes/s of one reader of an NVMe disk."""

_LENGTHS = (4096, 8192, 32_768)
_BALANCED = STEPS["balanced"].recompute_ratio
_PARTS = ("full", "load", "question", "wait", "repair", "last")
_BYTES = 2  # of a number


class Counted(NamedTuple):
    """The launches, bytes and waits of a blend, in each layer unless something else is named.

    question: launches of the pass that reads it, which moves and writes stored KV. repair: launches of the
    second pass. shift: those that move the other tokens in it. written, shifted: bytes moved by those of what
    is loaded, beside decoding it, and by those of the shift, for each of the prompt's KV. scored: bytes moved
    for each score of the question, in half of the layers. waits: of a prompt, for what the device has
    computed.
    """

    question: int
    repair: int
    shift: int
    written: float
    shifted: float
    scored: float
    waits: int


COUNTED = Counted(question=21, repair=11, shift=22, written=3.4, shifted=11, scored=25, waits=1)


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of a machine, each for one second.

    large, few: FLOP of matrix products, of thousands of rows and of hundreds. attention: FLOP of the
    engine's. scattered: of our kernel. memory: bytes of the GPU's own. link: bytes of pinned memory to the
    GPU. copy: bytes that one thread of the host copies. launch_s: seconds of a launch from Python. chunk_s:
    of what Python does to bring a layer of a chunk. wait_s, token_s: of a wait, and of what the host does for
    each token of the prompt before it launches again.
    """

    large: float
    few: float
    attention: float
    scattered: float
    memory: float
    link: float
    copy: float = 10e9
    launch_s: float = 1.1e-5
    chunk_s: float = 8e-6
    wait_s: float = 5e-4
    token_s: float = 1.2e-7


class Gpu(NamedTuple):
    """A GPU as its maker states it: bytes of its memory, FLOP/s of dense bfloat16, bytes/s of its memory, and
    of its link one way."""

    name: str
    size: float
    flops: float
    memory: float
    link: float
    source: str

    @property
    def rates(self) -> Rates:
        """Return the rates that kernels reach: the shares that an H100 reached (docs/gpu.md). The engine's
        attention is taken to be as fast as PyTorch's."""
        return Rates(
            large=0.8 * self.flops,
            few=0.7 * self.flops,
            attention=0.73 * self.flops,
            scattered=0.31 * self.flops,
            memory=0.84 * self.memory,
            link=0.85 * self.link,
        )


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 80e9, 989e12, 3.35e12, 64e9, "NVIDIA H100 data sheet, SXM"),
        Gpu("H200", 141e9, 989e12, 4.8e12, 64e9, "NVIDIA H200 data sheet, SXM"),
        Gpu("A100", 80e9, 312e12, 2.039e12, 32e9, "NVIDIA A100 data sheet, SXM of 80 GB"),
        Gpu("L40S", 48e9, 362e12, 0.864e12, 32e9, "NVIDIA L40S data sheet"),
        Gpu("RTX 4090", 24e9, 165e12, 1.008e12, 32e9, "NVIDIA Ada architecture paper, sums in float32"),
        Gpu("MI300X", 192e9, 1307e12, 5.3e12, 64e9, "AMD Instinct MI300X data sheet"),
    )
}


class Shape(NamedTuple):
    """The shape of a model of Llama's kind. weights: the numbers that each row is multiplied by, of all
    layers, and of the last token in the output."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    size: int
    vocabulary: int

    @property
    def weights(self) -> int:
        attention = 2 * self.hidden * self.size * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)


EIGHT = "Llama 3 8B"
SHAPES = {
    "Llama 3.2 1B": Shape(16, 2048, 8192, 32, 8, 64, 128_256),
    "Llama 3.2 3B": Shape(28, 3072, 8192, 24, 8, 128, 128_256),
    EIGHT: Shape(32, 4096, 14_336, 32, 8, 128, 128_256),
    "Qwen3 14B": Shape(40, 5120, 17_408, 40, 8, 128, 151_936),
    "Qwen3 32B": Shape(64, 5120, 25_600, 64, 8, 128, 151_936),
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds to the first token: of full prefill, and of a blend by its parts. Loading and the question's
    pass hide behind each other."""

    full_s: float
    load_s: float
    question_s: float
    wait_s: float
    repair_s: float
    last_s: float

    @property
    def blend_s(self) -> float:
        return max(self.load_s, self.question_s) + self.wait_s + self.repair_s + self.last_s

    @property
    def times(self) -> float:
        """Return how many times faster the blend is."""
        return self.full_s / self.blend_s


def estimate(
    rates: Rates,
    shape: Shape,
    tokens: int,
    ratio: float,
    codec: str = "int8",
    tier: float = float("inf"),
) -> Estimate:
    """Return the estimate for a prompt of documents and a short question. tier: bytes/s at which their KV
    comes into memory, if it is not there; it is copied to pinned memory then."""
    cached = tokens - FRESH_TOKENS
    row = make_codec(codec, shape.kv_heads, shape.size, torch.bfloat16).row_bytes(CHUNK_TOKENS)
    chunk_layers = shape.layers * cached / CHUNK_TOKENS
    coming = 0 if tier == float("inf") else row / tier + row / rates.copy
    kv = 2.0 * _BYTES * cached * shape.layers * shape.kv_heads * shape.size

    def attended(pairs: float) -> float:
        return 4 * pairs * shape.heads * shape.size * shape.layers

    def computed(rows: float, pairs: float, moved: float, launches: int) -> float:
        products = max(2 * rows * shape.weights / rates.few, _BYTES * shape.weights / rates.memory)
        device = products + attended(pairs) / rates.scattered + moved / rates.memory
        return max(device, shape.layers * launches * rates.launch_s)

    products = max(2 * tokens * shape.weights / rates.large, _BYTES * shape.weights / rates.memory)
    rows, launches = ratio * cached + FRESH_TOKENS, COUNTED.repair + COUNTED.shift
    pairs = ratio * cached * tokens / 2 + FRESH_TOKENS * tokens
    scores = QUESTION_TOKENS * cached * shape.heads * shape.layers / 2
    step = _BYTES * (shape.weights + shape.hidden * shape.vocabulary) / rates.memory
    return Estimate(
        full_s=products + attended(tokens**2 / 2) / rates.attention,
        load_s=chunk_layers * max(row / rates.link, rates.chunk_s + coming),
        question_s=computed(
            QUESTION_TOKENS,
            QUESTION_TOKENS * tokens,
            COUNTED.written * kv + COUNTED.scored * scores + chunk_layers * row + kv,
            COUNTED.question,
        ),
        wait_s=COUNTED.waits * (rates.wait_s + cached * rates.token_s),
        repair_s=computed(rows, pairs, COUNTED.shifted * kv, launches),
        last_s=2 * step,  # the engine's own, and what it has begun before
    )


def break_even(rates: Rates, shape: Shape, ratio: float, tier: float = float("inf")) -> int | None:
    """Return from which power of two of tokens on a blend is faster; None: up to 128K none is."""
    lengths = [1 << power for power in range(8, 18)]
    faster = [estimate(rates, shape, tokens, ratio, tier=tier).times > 1 for tokens in lengths]
    slower = [at for at, is_faster in enumerate(faster) if not is_faster]
    first = slower[-1] + 1 if slower else 0
    return lengths[first] if first < len(lengths) else None


def measure(device: torch.device, size: int = 4096) -> Rates:
    """Measure a GPU's rates; those of attention are taken to be shares of its matrix products'."""

    def seconds(work: Callable[[], object], repeats: int = 10) -> float:
        for repeat in range(repeats + 3):
            if repeat == 3:
                torch.accelerator.synchronize(device)
                begin = time.perf_counter()
            work()
        torch.accelerator.synchronize(device)
        return (time.perf_counter() - begin) / repeats

    def random(*shape: int) -> torch.Tensor:  # products of equal numbers take less power, and time
        return torch.randn(shape, dtype=torch.bfloat16).to(device)

    weights, few, many = random(size, 3 * size), random(size // 8, size), random(2 * size, size)
    # More than caches hold.
    host, pinned = (torch.ones(16 * size * size, dtype=torch.uint8) for _ in range(2))
    pinned, there = pinned.pin_memory(), pinned.to(device)
    one, out = weights.new_ones(1), torch.empty_like(weights)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    copied = seconds(lambda: pinned.copy_(host), 3)
    torch.set_num_threads(threads)
    large = 2 * len(many) * weights.numel() / seconds(lambda: many @ weights)
    return Rates(
        large=large,
        few=2 * len(few) * weights.numel() / seconds(lambda: few @ weights),
        attention=0.9 * large,
        scattered=0.39 * large,
        memory=2 * weights.nbytes / seconds(lambda: out.copy_(weights)),
        link=pinned.nbytes / seconds(lambda: there.copy_(pinned, non_blocking=True)),
        copy=pinned.nbytes / copied,
        launch_s=seconds(lambda: one.add_(1), 1000),
    )


@dataclass(frozen=True, slots=True)
class ModelResults(Results):
    """Results of ``bench ttft --gpu``: the rates that a GPU's kernels reach by what is stated of it, and
    those of the one that is ``here``; by these, tokens and codec, what a prompt takes."""

    counted: dict[str, float]
    rates: dict[str, Rates]
    seconds: dict[str, dict[int, dict[str, Estimate]]]

    def parts(self) -> Iterator[Table | str]:
        """Yield the tables, and where the rates are from."""
        titles = (
            f"{EIGHT} on {next(iter(self.rates))}, by what is stated of it: balanced, KV in RAM, ms",
            f"{EIGHT}, int8 in RAM",
            "Where balanced begins to be faster, int8 in RAM, or on a disk of 2.8 GB/s",
        )
        for title, table in zip(titles, tables(self), strict=True):
            yield from (title, table, "")
        yield from (f"{gpu.name}: {gpu.source}" for gpu in GPUS.values())


def run_model(options: ModelOptions, here: Rates | None = None) -> ModelResults:
    """Return the model's results, with rates measured where a GPU is. Raises ConfigError."""
    if options.gpu not in GPUS:
        raise ConfigError(f"--gpu {options.gpu!r}: {', '.join(GPUS)} are known")
    if torch.cuda.is_available():
        here = measure(torch.device("cuda"))
    rates = {options.gpu: GPUS[options.gpu].rates} | ({"here": here} if here else {})
    seconds = {
        name: {
            tokens: {
                codec: estimate(each, SHAPES[EIGHT], tokens, _BALANCED, codec) for codec in ("raw", "int8")
            }
            for tokens in _LENGTHS
        }
        for name, each in rates.items()
    }
    return ModelResults(COUNTED._asdict(), rates, seconds)


def _from_when(gpu: Gpu, shape: Shape, tier: float) -> str:
    if _BYTES * (shape.weights + 2 * shape.hidden * shape.vocabulary) > 0.9 * gpu.size:
        return "too large"
    length = break_even(gpu.rates, shape, _BALANCED, tier)
    return "never" if length is None else f"{length:,}"


def tables(results: ModelResults) -> list[Table]:
    """Return where time goes, other GPUs and ratios, and the lengths from which on blends are faster."""
    parts = table_with("tokens", "codec", *_PARTS, "sum", "times faster")
    for name, of_rates in results.seconds.items():
        for tokens, of_prompt in of_rates.items():
            for codec, found in of_prompt.items():
                shown = (f"{1e3 * number:,.1f}" for number in (*asdict(found).values(), found.blend_s))
                where = f"{tokens:,}{' here' if name == 'here' else ''}"
                parts.add_row(where, codec, *shown, f"{found.times:.1f}")
    others = table_with("times faster", *(f"{name} {n >> 10}K" for name in STEPS for n in _LENGTHS))
    for gpu in GPUS.values():
        points = itertools.product(STEPS.values(), _LENGTHS)
        found_at = (estimate(gpu.rates, SHAPES[EIGHT], n, step.recompute_ratio) for step, n in points)
        others.add_row(gpu.name, *(f"{one.times:.1f}" for one in found_at))
    faster = table_with("tokens", *GPUS)
    for name, each in SHAPES.items():
        for where, tier in (("RAM", float("inf")), ("disk", DISK)):
            cells = (_from_when(gpu, each, tier) for gpu in GPUS.values())
            faster.add_row(f"{name}, {where}", *cells)
    return [parts, others, faster]
