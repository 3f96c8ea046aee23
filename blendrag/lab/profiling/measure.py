"""Measurement of a profile: the engine's plain prefill, its fused prefill, and the tiers of its stack."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from blendrag.choice import Choice
from blendrag.control.profile import BlendPoint, PrefillPoint, Profile, profile_digest
from blendrag.engine.client.engine import Engine
from blendrag.errors import EngineError, PromptTooLongError
from blendrag.lab.arms import Arm, blended_prefill, prefix_caching, recipe_of
from blendrag.lab.experiment import measure
from blendrag.lab.profiling.tier_speed import measure_tiers
from blendrag.lab.prompts import QUESTIONS, Prompt, PromptMaker, Trial
from blendrag.lab.running import blending_engine
from blendrag.lab.scratch import ScratchStore, scratch_store
from blendrag.lab.texts import text_pieces
from blendrag.progress import Progress
from blendrag.serving.identity import kv_identity
from blendrag.settings import Settings
from blendrag.store.record import Layout
from blendrag.store.stack import TierSpec

_CHUNK_TOKENS = 512
_ROOM = 192  # tokens of a prompt around its chunks, at most
_MIN_POINTS = 4  # of each kind


@dataclass(frozen=True, slots=True)
class Grid:
    """The grid that is measured. cached, new: tokens, of plain prefill. blend: (chunks with KV, fewer
    without) of a prompt, each at all ratios. What does not fit the model's window is left out."""

    cached: tuple[int, ...] = (0, 512, 1536)
    new: tuple[int, ...] = (64, 512, 1536, 3072)
    blend: tuple[tuple[int, int], ...] = ((1, 0), (3, 0), (6, 0), (3, 2))
    ratios: tuple[float, ...] = (0.0, 0.15, 0.5, 1.0)
    repeats: int = 3

    @property
    def pieces(self) -> int:
        """The number of chunks of text that the grid takes."""
        longest = max(self.cached) + max(self.new)
        return max(-(-longest // _CHUNK_TOKENS), *(sum(chunks) for chunks in self.blend))


QUICK = Grid((0, 512), (64, 512, 1536), ((1, 0), (3, 0), (2, 1)), (0.0, 0.15, 1.0), 1)


def measure_profile(settings: Settings, grid: Grid, progress: Progress) -> Profile:
    """Start the engine and measure. Not saved yet.

    Raises ModelNotSupportedError for a model that is not blended, PromptTooLongError for a window too short
    to measure in, ConfigError, StoreError, EngineError.
    """
    with blending_engine(settings, progress) as engine:
        maker = PromptMaker.of(engine, settings)
        progress.note("cutting text into chunks")
        pieces = text_pieces(maker.tokenizer, grid.pieces, _CHUNK_TOKENS)
        with scratch_store(engine, settings, pieces, TierSpec(kind="ram")) as store:
            plain = _prefills(engine, grid, tuple(token for piece in pieces for token in piece))
            blended = _blends(engine, settings, grid, store, maker)
            if min(len(plain), len(blended)) < _MIN_POINTS:
                raise PromptTooLongError(
                    f"the model's window of {engine.max_model_len} tokens is too short to measure in"
                )
            progress.total(len(settings.stack))
            prefills, blends = (measure(engine, arms, progress) for arms in (plain, blended))
        for (cached, new), samples in prefills.items():
            if any(sample.recomputed != new for sample in samples):
                raise EngineError(f"the prefix cache did not have the {cached} tokens that it had just seen")
        identity, facts = kv_identity(settings, engine.model_path), engine.facts
        layout = Layout(identity, facts.dtype)
        # The least of each: whatever else the machine was doing has only ever added time.
        return Profile(
            identity=profile_digest(identity),
            model=settings.model,
            selector=Choice.read(settings.blending.selector).name,
            layers=facts.num_layers,
            kv_bytes=layout.num_layers * layout.row_bytes(_CHUNK_TOKENS) // _CHUNK_TOKENS,
            tiers=measure_tiers(settings, identity, facts.dtype, progress),
            machine=facts.machine(settings.model),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            prefill=tuple(
                PrefillPoint(cached=cached, new=new, seconds=min(one.ttft_ms for one in found) / 1e3)
                for (cached, new), found in prefills.items()
            ),
            blend=tuple(
                BlendPoint(
                    cached=cached,
                    fresh=fresh,
                    ratio=ratio,
                    seconds=min(one.fused_ms for one in found) / 1e3,
                    overhead_s=min(max(0.0, one.ttft_ms - one.fused_ms) for one in found) / 1e3,
                )
                for (cached, fresh, ratio), found in blends.items()
            ),
        )


def _prefills(engine: Engine, grid: Grid, text: tuple[int, ...]) -> dict[tuple[int, int], Arm]:
    """Measure, by cached and new tokens, plain prefill of the text, whose cached ones were asked before."""
    block = engine.facts.block_size
    arms: dict[tuple[int, int], Arm] = {}
    for cached in sorted({tokens // block * block for tokens in grid.cached}):
        for new in grid.new:
            if cached + new < engine.max_model_len:
                whole, before = (Prompt(text[:end], (("", 0, end),)) for end in (cached + new, cached))
                arms[cached, new] = prefix_caching(_repeated(whole, grid.repeats, before))
    return arms


def _blends(
    engine: Engine, settings: Settings, grid: Grid, store: ScratchStore, maker: PromptMaker
) -> dict[tuple[int, int, float], Arm]:
    """Measure blends by cached and fresh tokens and ratio."""
    arms: dict[tuple[int, int, float], Arm] = {}
    for stored, without in grid.blend:
        if (stored + without) * _CHUNK_TOKENS + _ROOM >= engine.max_model_len:
            continue
        prompt = maker.make(store.chunks[: stored + without], QUESTIONS[0])
        # Those without KV stand between the others, where they have the average number of tokens before them.
        gaps = range(1, 2 * without, 2)
        spans = (span for at, span in enumerate(prompt.spans) if at not in gaps)
        prompt = replace(prompt, spans=tuple(spans))
        cached = prompt.chunk_tokens()
        for ratio in grid.ratios:
            trials = _repeated(prompt, grid.repeats)
            arm = blended_prefill(trials, recipe_of(settings, store.id, ratio))
            arms[cached, len(prompt.token_ids) - cached, ratio] = arm
    return arms


def _repeated(prompt: Prompt, repeats: int, before: Prompt | None = None) -> list[Trial]:
    """Return one prompt as the trials of an arm, the warm-up first. before: what was asked before it."""
    return [Trial(prompt, before or prompt)] * (repeats + 1)
