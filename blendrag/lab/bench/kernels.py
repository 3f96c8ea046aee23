"""``bench kernels``: the pieces of a layer against the floor of this machine's arithmetic, at the shape of
blends that were just served."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from blendrag.errors import ConfigError
from blendrag.lab.arms import BlendedPrefill, recipe_of
from blendrag.lab.bench.floors import CHECK_LAYER, LAYER, Floors, analyse
from blendrag.lab.experiment import measure
from blendrag.lab.prompts import PromptMaker, check_prompts
from blendrag.lab.report import where
from blendrag.lab.running import blending_engine
from blendrag.lab.scratch import scratch_store
from blendrag.lab.setup import Setup
from blendrag.lab.statistics import Spread, spread
from blendrag.lab.texts import text_pieces
from blendrag.lab.worker.operations import PieceTimes
from blendrag.progress import Progress
from blendrag.settings import Settings
from blendrag.tables import table_with

_BLENDS = 7
_NAMES = {
    "rotate": "rotate stored K",
    "write_stored": "write stored KV",
    "qkv": "norm, QKV, RoPE",
    "write": "write fresh KV",
    "attention": "attention",
    "o_proj": "output projection",
    "mlp": "norm, MLP",
    "select": "deviation, selection",
    "gather": "gather rows",
    "metadata": "attention metadata",
}


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """The blend whose layer is measured: ``ratio`` of ``chunks`` of ``chunk_tokens`` tokens recomputed by
    HKVD. ``repeats``: how often each piece is timed."""

    chunks: int = 6
    chunk_tokens: int = 512
    ratio: float = 0.15
    repeats: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.ratio < 1.0:
            raise ConfigError(f"--ratio must be above 0 and below 1, not {self.ratio:g}")


@dataclass(frozen=True, slots=True)
class KernelResults:
    """floors: of the pieces. ttft_ms: of blends of this shape, served in the same run."""

    floors: Floors
    ttft_ms: Spread
    setup: Setup[KernelOptions]

    def to_dict(self) -> dict[str, Any]:
        found = self.floors
        sums = {name: getattr(found, name) for name in ("pieces_ms", "floor_ms", "full_floor_ms")}
        pieces = {
            name: asdict(piece) | {"ratio": piece.ratio, "over_ms": piece.over_ms}
            for name, piece in found.pieces.items()
        }
        return {
            "rates": asdict(found.rates),
            "pieces": pieces,
            "blend": {"ttft_ms": asdict(self.ttft_ms)} | sums,
            "shape": asdict(found.shape),
        } | self.setup.to_dict()


def run_kernels(settings: Settings, options: KernelOptions, progress: Progress) -> KernelResults:
    """Raises ConfigError, ModelError (also for a model whose layers run whole), PromptTooLongError,
    EngineError."""
    blend = {"selector": f"hkvd:check_layers={CHECK_LAYER}", "recompute_ratio": options.ratio}
    settings = settings.model_copy(update=blend)
    with blending_engine(settings, progress) as engine:
        maker = PromptMaker.of(engine, settings)
        progress.note("cutting text into chunks")
        pieces = text_pieces(maker.tokenizer, options.chunks, options.chunk_tokens)
        with scratch_store(engine, settings, pieces, filled=False) as store:
            trials = maker.trials(store.chunks, options.chunks, _BLENDS + 1, options.seed)
            prompts = [trial.prompt for trial in trials]
            check_prompts(prompts, engine.max_model_len)
            progress.total(2)
            spans = [[start, length] for _, start, length in prompts[0].spans]
            progress.note("timing a layer's pieces")
            words = len(prompts[0].token_ids), spans, options.ratio, options.repeats
            measured = PieceTimes.from_plain(engine.call("kernels", *words))
            progress.advance()
            progress.note("ingest")
            store.fill(store.chunks)
            progress.advance()
            arm = BlendedPrefill([[trial] for trial in trials], recipe_of(settings, store.id))
            served = measure(engine, {arm.name: arm}, progress)[arm.name]
        ttft_ms = spread([sample.ttft_ms for sample in served])
        return KernelResults(analyse(measured), ttft_ms, Setup.of(engine, settings, options, prompts))


def print_kernels(results: KernelResults, console: Console) -> None:
    """A row per piece: time, floor and what is between; then the blend as a whole."""
    pieces = results.floors.pieces
    table = table_with("piece", "best ms", "median", "floor", "by", "best/floor", "times", "over")
    for name in (*LAYER, *(name for name in pieces if name not in LAYER)):
        piece = pieces[name]
        table.add_row(
            _name(name),
            f"{piece.best_ms:.2f}",
            f"{piece.median_ms:.2f}",
            f"{piece.floor_ms:.2f}" if piece.floor_ms else "-",
            piece.bound.replace("none", ""),
            f"{piece.ratio:.1f}x" if piece.ratio else "-",
            str(piece.count),
            f"{piece.over_ms:.1f}",
        )
    for part in (_layer(results), table, _LEGEND, _blend(results), _facts(results)):
        console.print(part, markup=False)


def _name(piece: str) -> str:
    return _NAMES[piece.removesuffix("_all")] + (", all rows" if piece.endswith("_all") else "")


_LEGEND = (
    "floor: operations at the best rate of multiplying, or bytes at the best rate of copying, whichever is"
    " longer. times, over: how often in a blend, and its ms above the floor there.\n"
)


def _layer(results: KernelResults) -> str:
    shape, rates = results.floors.shape, results.floors.rates
    return (
        f"One layer of {shape.layers}: {shape.rows:,} of {shape.tokens:,} tokens in {shape.runs:,} runs,"
        f" {shape.cached:,} stored. Multiplying {rates.flops / 1e9:,.0f} GFLOP/s ({rates.flops_of}), copying"
        f" {rates.bytes / 1e9:,.1f} GB/s ({rates.bytes_of})."
    )


def _blend(results: KernelResults) -> str:
    ttft, pieces = results.ttft_ms.median, results.floors.pieces
    floor, known, full = results.floors.floor_ms, results.floors.pieces_ms, results.floors.full_floor_ms
    lost = sorted(pieces, key=lambda name: -pieces[name].over_ms)[:3]
    worst = "; ".join(f"{_name(name)} {pieces[name].over_ms:,.0f} ms" for name in lost)
    return (
        f"A blend: TTFT {ttft:,.0f} ms = floor {floor:,.0f} + pieces above it {known - floor:,.0f}"
        f" + everything else {ttft - known:,.0f}. TTFT is {ttft / floor:.1f}x the floor, the pieces"
        f" {known / floor:.1f}x.\n"
        f"The floor of a full prefill is {full:,.0f} ms: {full / floor:.1f}x a blend's. Most lost: {worst}.\n"
    )


def _facts(results: KernelResults) -> str:
    setup, options = results.setup, results.setup.options
    return (
        f"{options.chunks} chunks of {options.chunk_tokens} tokens, {options.ratio:.0%} recomputed, mask"
        f" {setup.mask}, {options.repeats} times each, in {setup.machine.dtype}; {where(setup.machine)}."
    )
