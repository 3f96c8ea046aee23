"""Measures a profile: the engine's plain prefill, its fused prefill, and the tiers of its stack."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any, TypeVar

from blendrag.bench.arms import reset
from blendrag.bench.ingest import TemporaryStore, temporary_store
from blendrag.bench.machine import describe_machine
from blendrag.bench.progress import BenchProgress
from blendrag.bench.prompts import QUESTIONS, Prompt, PromptMaker
from blendrag.bench.texts import cut_chunks, installed_texts
from blendrag.control.profile import BlendPoint, PrefillPoint, Profile, profile_digest
from blendrag.control.tier_speed import measure_tiers
from blendrag.engine.generation import Sampling
from blendrag.engine.handle import Engine
from blendrag.engine.recipe import Recipe
from blendrag.errors import EngineError, ModelNotSupportedError, PromptTooLongError
from blendrag.prompt import encode_document
from blendrag.serving.identity import kv_identity
from blendrag.settings import Settings
from blendrag.store.tiers.spec import TierSpec

CHUNK_TOKENS = 512
FIRST_TOKEN = Sampling(max_tokens=1)
_ROOM = 192  # tokens of a prompt around its chunks, at most

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured. cached, new: tokens, of plain prefill. blend: (chunks with KV, chunks without) of a
    prompt, each at all ratios. What does not fit the model's window is left out."""

    cached: tuple[int, ...] = (0, 512, 1536)
    new: tuple[int, ...] = (64, 512, 1536, 3072)
    blend: tuple[tuple[int, int], ...] = ((1, 0), (3, 0), (6, 0), (3, 2))
    ratios: tuple[float, ...] = (0.0, 0.15, 0.5, 1.0)
    repeats: int = 3

    @property
    def pieces(self) -> int:
        """Chunks of text it takes."""
        longest = max(self.cached) + max(self.new)
        return max(-(-longest // CHUNK_TOKENS), *(with_kv + without for with_kv, without in self.blend))


QUICK = Grid((0, 512), (64, 512, 1536), ((1, 0), (3, 0), (2, 1)), (0.0, 0.15, 1.0), 1)


def measure_profile(settings: Settings, grid: Grid, progress: BenchProgress) -> Profile:
    """Start the engine and measure. Not saved yet.

    Raises ModelNotSupportedError for a model that is not blended, PromptTooLongError for a window too short
    to measure in, ConfigError, StoreError, EngineError.
    """
    engine = Engine.shared(settings, progress.note)
    try:
        if not engine.blends:
            raise ModelNotSupportedError(f"this model is not blended: {engine.facts['reason']}")
        return _measure(engine, settings, grid, progress)
    finally:
        engine.release()


def _measure(engine: Engine, settings: Settings, grid: Grid, progress: BenchProgress) -> Profile:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(engine.model_path))
    progress.note("cutting text into chunks")
    pieces = text_pieces(tokenizer, grid.pieces)
    maker = PromptMaker(tokenizer, system_prompt=settings.system_prompt, separator=settings.separator)
    in_memory = settings.model_copy(update={"tiers": (TierSpec(kind="ram"), TierSpec(kind="disk"))})
    with temporary_store(engine, in_memory, pieces) as store:
        fill(engine, store)
        prefills = _prefill_runs(engine, grid, [token for piece in pieces for token in piece])
        blends = _blend_runs(engine, settings, grid, store, maker)
        if len(prefills) < 3 or len(blends) < 3:
            raise PromptTooLongError(f"a window of {engine.max_model_len} tokens is too short to measure")
        rounds = grid.repeats + 1
        progress.total(rounds * (len(prefills) + len(blends)) + len(settings.stack))
        prefill_s = _interleaved(prefills, rounds, progress, "prefill")
        blend_s = _interleaved(blends, rounds, progress, "blend")
    identity = kv_identity(settings, engine.model_path)
    tiers = measure_tiers(settings, identity, engine.facts["dtype"], progress)
    return Profile(
        identity=profile_digest(identity),
        model=settings.model,
        selector=settings.selector,
        layers=engine.facts["num_layers"],
        machine=describe_machine(settings.model, engine.facts),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        prefill=tuple(
            PrefillPoint(cached=cached, new=new, seconds=median(ttft for ttft, _ in found))
            for (cached, new), found in prefill_s.items()
        ),
        blend=tuple(
            BlendPoint(
                cached=cached,
                fresh=fresh,
                ratio=ratio,
                seconds=median(fused for _, fused in found),
                overhead_s=median(max(0.0, ttft - fused) for ttft, fused in found),
            )
            for (cached, fresh, ratio), found in blend_s.items()
        ),
        tiers=tiers,
    )


def text_pieces(tokenizer: Any, count: int) -> list[tuple[int, ...]]:
    """Different chunks of CHUNK_TOKENS tokens of real text: which tokens deviate, and so how scattered they
    are, depends on it. Raises ConfigError."""

    def encode(text: str) -> Sequence[int]:
        return encode_document(tokenizer, text)

    return cut_chunks(installed_texts(), encode, CHUNK_TOKENS, least=count, most=count)


def fill(engine: Engine, store: TemporaryStore) -> None:
    """Have all chunks of a store prefilled and written."""
    for chunk in store.chunks:
        engine.call("ingest", store.id, [[chunk.key, list(chunk.token_ids)]])
    engine.call("flush", store.id)


# A measurement: seconds to the first token, and of these, of the fused prefill.
Run = Callable[[], tuple[float, float]]


def _interleaved(
    runs: Mapping[K, Run], rounds: int, progress: BenchProgress, what: str
) -> dict[K, list[tuple[float, float]]]:
    """All runs in turn, in rounds, each beginning with another one. The first round is a warm-up."""
    found: dict[K, list[tuple[float, float]]] = {key: [] for key in runs}
    keys = list(runs)
    for number in range(rounds):
        progress.note(f"{what}: round {number} of {rounds - 1}" if number else f"{what}: warm-up")
        shift = number * len(keys) // rounds
        for key in (*keys[shift:], *keys[:shift]):
            seconds = runs[key]()
            if number:
                found[key].append(seconds)
            progress.step()
    return found


def _prefill_runs(engine: Engine, grid: Grid, text: Sequence[int]) -> dict[tuple[int, int], Run]:
    block = int(engine.facts["block_size"])
    runs: dict[tuple[int, int], Run] = {}
    for cached in sorted({tokens // block * block for tokens in grid.cached}):
        for new in grid.new:
            if cached + new < engine.max_model_len:
                runs[cached, new] = _prefill_run(engine, text[: cached + new], cached)
    return runs


def _prefill_run(engine: Engine, ids: Sequence[int], cached: int) -> Run:
    def run() -> tuple[float, float]:
        reset(engine)
        if cached:
            engine.generate(ids[:cached], FIRST_TOKEN)
        delta = engine.generate(ids, FIRST_TOKEN)
        if delta.prefix_tokens != cached:
            raise EngineError(f"of {cached} cached tokens the prefix cache had {delta.prefix_tokens}")
        return delta.ttft_s, 0.0

    return run


def _blend_runs(
    engine: Engine, settings: Settings, grid: Grid, store: TemporaryStore, maker: PromptMaker
) -> dict[tuple[int, int, float], Run]:
    runs: dict[tuple[int, int, float], Run] = {}
    for with_kv, without in grid.blend:
        if (with_kv + without) * CHUNK_TOKENS + _ROOM >= engine.max_model_len:
            continue
        prompt = maker.make(store.chunks[: with_kv + without], QUESTIONS[0])
        prompt = replace(prompt, spans=prompt.spans[:with_kv])
        cached = prompt.chunk_tokens()
        for ratio in grid.ratios:
            recipe = recipe_for(settings, store, prompt, ratio)
            runs[cached, len(prompt.token_ids) - cached, ratio] = _blend_run(engine, prompt, recipe)
    return runs


def recipe_for(settings: Settings, store: TemporaryStore, prompt: Prompt, ratio: float) -> Recipe:
    """How a prompt of a measurement is blended."""
    return Recipe(
        store.id,
        prompt.spans,
        selector=settings.selector,
        ratio=ratio,
        metric=settings.metric,
        check_layers=settings.check_layers,
        threshold=settings.threshold,
    )


def _blend_run(engine: Engine, prompt: Prompt, recipe: Recipe) -> Run:
    return lambda: blend_once(engine, prompt, recipe)


def blend_once(engine: Engine, prompt: Prompt, recipe: Recipe) -> tuple[float, float]:
    """Seconds to the first token, and of these, of the fused prefill. Raises EngineError if it was not
    blended."""
    reset(engine)
    delta = engine.generate(prompt.token_ids, FIRST_TOKEN, recipe)
    report = delta.report or {"fallback": "the engine gave no report"}
    if "fallback" in report or report["missing"]:
        reason = report.get("fallback") or f"chunks are missing: {report['missing']}"
        raise EngineError(f"a prompt was not blended, so its time would mean nothing: {reason}")
    return delta.ttft_s, sum(report["ms"][part] for part in ("load", "select", "recompute")) / 1e3
