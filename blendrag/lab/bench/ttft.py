"""Time to the first token: full prefill, prefix caching, full reuse and blending on the same prompts, at the
values of one parameter (CacheBlend figures 12, 15, 16 and 17)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from blendrag.lab.arms import Arm, blended_prefill, exact_prefix, full_prefill, prefix_caching, recipe_of
from blendrag.lab.bench.axes import AXES, Axis, Point, Value, tiers_of
from blendrag.lab.bench.options import TtftOptions
from blendrag.lab.experiment import measure
from blendrag.lab.prompts import Prompt, PromptMaker, Trial, check_prompts
from blendrag.lab.results import Setup
from blendrag.lab.running import blending_engine
from blendrag.lab.scratch import ScratchStore, ScratchTree, scratch_store, scratch_tree
from blendrag.lab.statistics import Summary, summarise
from blendrag.lab.texts import text_pieces
from blendrag.progress import Progress
from blendrag.select import make_selector
from blendrag.settings import Settings
from blendrag.store.codec import Codec
from blendrag.store.record import Layout

ArmKey = tuple[Any, ...]  # an arm's name, and what its prompts and its store depend on
ARMS = ("full", "prefix", "reuse", "blended")
_POOL = 4  # chunks in a store, per chunk of the largest prompt
EXACT = "raw"
_READ_BACK = 6  # chunks whose KV every codec is measured on


@dataclass(frozen=True, slots=True)
class CodecCost:
    """The cost of a codec. k_error, v_error: norm of the difference by norm, mean over chunks and layers."""

    bytes_per_token: float
    k_error: float
    v_error: float


def measure_codecs(names: Sequence[str], exact: ScratchStore, dtype: str) -> dict[str, CodecCost]:
    """Return each codec's cost on the KV of ``exact``, whose codec is ``EXACT``."""
    records = exact.read_back(exact.chunks[:_READ_BACK], dtype)
    layouts = {name: Layout(replace(exact.identity, codec=name), dtype) for name in names}
    return {name: measure_codec(layout.codec, records) for name, layout in layouts.items()}


def measure_codec(codec: Codec, records: Sequence[torch.Tensor]) -> CodecCost:
    """Measure a codec on KV as the model made it, each [layers, 2, tokens, heads, size]."""
    layers, _, tokens = records[0].shape[:3]
    key, value = np.mean([_errors(codec, each) for each in records], axis=0)
    return CodecCost(layers * codec.row_bytes(tokens) / tokens, float(key), float(value))


def _errors(codec: Codec, kv: torch.Tensor) -> list[float]:
    """Return the relative error of K and of V, mean over layers."""
    found = torch.empty_like(kv)
    for row, (key, value) in zip(codec.encode(kv), found, strict=True):
        codec.decode(row, kv.shape[2], key, value)
    exact = kv.float().flatten(2)
    ratio: list[float] = ((found.float().flatten(2) - exact).norm(dim=2) / exact.norm(dim=2)).mean(0).tolist()
    return ratio


@dataclass(frozen=True, slots=True)
class TtftResults:
    """Results of ``bench ttft``. arms: every arm once, ``full`` first. points: per value of the axis the arms
    full, prefix, reuse and blended, and exact ones. codecs: by value of that axis."""

    arms: dict[str, Summary]
    points: dict[Value, dict[str, Summary]]
    codecs: dict[str, CodecCost]
    setup: Setup[TtftOptions]

    @property
    def axis(self) -> Axis:
        return AXES[self.setup.options.axis]

    def to_dict(self) -> dict[str, Any]:
        points = [
            {"value": value, "arms": {name: arm.to_dict() for name, arm in point.items()}}
            for value, point in self.points.items()
        ]
        found = {
            "arms": {name: arm.to_dict() for name, arm in self.arms.items()},
            "axis": self.axis.name,
            "label": self.axis.label,
            "points": points,
            "codecs": {name: asdict(cost) for name, cost in self.codecs.items()},
        }
        return found | self.setup.to_dict()


def run_ttft(settings: Settings, options: TtftOptions, progress: Progress) -> TtftResults:
    """Measure times to the first token.

    Raises ConfigError, SourceError, ModelError, PromptTooLongError, StoreError, EngineError.
    """
    make_selector(settings.blending)  # what is wrong is told before the long start
    start = Point(options.chunks, options.chunk_tokens, settings.blending.recompute_ratio, settings.new_codec)
    axis = AXES[options.axis]
    points = {value: axis.at(start, value) for value in options.values}
    with blending_engine(settings, progress, exact=options.exact) as engine, ExitStack() as opened:
        maker = PromptMaker.of(engine, settings)
        progress.note("cutting text into chunks")
        most = max(point.chunks for point in points.values())
        pieces = [
            piece
            for tokens in sorted({point.chunk_tokens for point in points.values()})
            for piece in text_pieces(maker.tokenizer, _POOL * most, tokens, least=most)
        ]
        stores: dict[tuple[str, str], ScratchStore] = {}
        for point in points.values():
            if point.store not in stores:
                progress.note(f"ingest: {point.codec} in {point.tier}")
                own = settings.model_copy(update={"codec": point.codec})
                spec = tiers_of(settings)[point.tier]
                stores[point.store] = opened.enter_context(
                    scratch_store(engine, own, pieces, spec, filled=engine.blends)
                )
        tree = None
        if options.exact and engine.facts.blocks:
            tree = opened.enter_context(scratch_tree(engine, settings, disk=True))
        arms, cases = _arms(settings, options, maker, points, stores, tree, blended=engine.blends)
        prompts = [trial.prompt for arm in arms.values() for trial in arm.trials]
        check_prompts(prompts, engine.max_model_len)
        samples = measure(engine, arms, progress)
        codecs = {}
        if axis.name == "codec" and EXACT in points:
            names = [str(value) for value in points]
            codecs = measure_codecs(names, stores[points[EXACT].store], engine.facts.dtype)
        setup = Setup.of(engine, settings, options, prompts)
    found = {
        value: summarise({name: samples[key] for name, key in case.items()}, ("full", "prefix"))
        for value, case in cases.items()
    }
    return TtftResults(
        {arms[key].name: found[value][name] for value, case in cases.items() for name, key in case.items()},
        found,
        codecs,
        setup,
    )


def _arms(
    settings: Settings,
    options: TtftOptions,
    maker: PromptMaker,
    points: Mapping[Value, Point],
    stores: Mapping[tuple[str, str], ScratchStore],
    tree: ScratchTree | None = None,
    *,
    blended: bool = True,
) -> tuple[dict[ArmKey, Arm], dict[Value, dict[str, ArmKey]]]:
    """Return the arms, and per value which are its own. Points share those that do not depend on what is
    varied, as full prefill does not depend on the ratio: they are measured once. blended: whether there are
    those that blend. Where there are none, prefix caching has seen the documents in this very order."""
    arms: dict[ArmKey, Arm] = {}
    cases: dict[Value, dict[str, ArmKey]] = {}
    for value, point in points.items():
        store = stores[point.store]
        trials = _trials(maker, store, point, options)
        cold = None if point.tier == "ram" else store
        recipe = recipe_of(settings, store.id, point.ratio)
        if point.quality:
            recipe = replace(recipe, options=replace(recipe.options, **point.step._asdict()))
        own: dict[str, Arm] = {"full": full_prefill(trials), "prefix": prefix_caching(trials)}
        if tree is not None:
            own["exact"] = exact_prefix(trials, tree)
            own["exact cold"] = exact_prefix(trials, tree, cold=True)
        stored = {
            "reuse": blended_prefill(trials, recipe_of(settings, store.id, 0.0), cold),
            "blended": blended_prefill(trials, recipe, cold, point.quality),
        }
        cases[value] = {kind: (arm.name, *point.prompts) for kind, arm in own.items()}
        if not blended:
            stored = {}
            own["prefix"] = prefix_caching([_in_order(trial) for trial in trials])
        cases[value] |= {kind: (arm.name, *point.prompts, *point.store) for kind, arm in stored.items()}
        for kind, arm in (own | stored).items():
            arms.setdefault(cases[value][kind], arm)
    return arms, cases


def _in_order(trial: Trial) -> Trial:
    """Return the trial with its own prompt, without most of its question, before it."""
    _, start, length = trial.prompt.spans[-1]
    return replace(trial, before=Prompt(trial.prompt.token_ids[: start + length + 1], ()))


def _trials(maker: PromptMaker, store: ScratchStore, point: Point, options: TtftOptions) -> list[Trial]:
    """Return the trials, the same whichever store they are from; the first one is the warm-up."""
    own = [chunk for chunk in store.chunks if len(chunk.token_ids) == point.chunk_tokens]
    return maker.trials(own, point.chunks, options.repeats + 1, f"{options.seed} {point.prompts}")
